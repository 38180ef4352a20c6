//! How the time of RoutedAttention grows with length, active share and batch.

use crate::measure::{Settings, Table, Way};
use crate::operators::{Attention, times};
use anyhow::Result;
use serde_json::Value as Json;

const BASE: Attention = Attention { batch: 1, len: 1024, heads: 16, dim: 64, causal: false };

pub(crate) fn run(settings: &Settings, tables: &mut Vec<Json>) -> Result<()> {
    let threads = settings.threads.first().copied().unwrap_or(1);
    let lengths = [128, 256, 512, 1024, 2048, 4096, 8192].map(|len| (Attention { len, ..BASE }, 0.75));
    grow(
        "With the length: 16 heads of width 64, 75 % of them",
        "tokens",
        |c, _| c.len.to_string(),
        &lengths,
        threads,
        settings,
        tables,
    )?;
    let shares = [1.0, 0.9, 0.75, 0.5, 0.25].map(|share| (BASE, share));
    let percent = |_: &Attention, share: f64| format!("{:.0} %", 100.0 * share);
    grow(
        "With the share of active heads: 16 heads of width 64, 1024 tokens",
        "heads used",
        percent,
        &shares,
        threads,
        settings,
        tables,
    )?;
    let batches = [1, 2, 4, 8].map(|batch| (Attention { batch, len: 256, ..BASE }, 0.75));
    grow(
        "With the batch: 256 tokens each, 16 heads of width 64, 75 % of them",
        "batch",
        |c, _| c.batch.to_string(),
        &batches,
        threads,
        settings,
        tables,
    )
}

fn grow(
    name: &'static str,
    column: &str,
    label: impl Fn(&Attention, f64) -> String,
    cases: &[(Attention, f64)],
    threads: usize,
    settings: &Settings,
    tables: &mut Vec<Json>,
) -> Result<()> {
    if !settings.wants(name) {
        return Ok(());
    }
    let mut table = Table::new(name, &[column, "MultiHeadAttention ms", "RoutedAttention ms", "ratio"], tables);
    for (case, share) in cases {
        let graphs = vec![
            (case.multi_head(), Way::Alone, case.inputs(1.0)?),
            (case.routed(false), Way::Library, case.inputs(*share)?),
        ];
        let times = times(graphs, threads, settings)?;
        let ratio = format!("{:.2}", times[1].min / times[0].min);
        table.row(&[label(case, *share), times[0].cell(), times[1].cell(), ratio]);
    }
    Ok(())
}
