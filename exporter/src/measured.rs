//! Measured times of published models: one table for README and `inspect`.

use crate::error::Error;
use crate::inspect::{Lengths, inspect};
use moh_models::Model;
use moh_models::presets::Preset;
use serde::Serialize;
use std::fmt;

/// The figures; docs/performance.md says how they are measured.
const TABLE: &str = include_str!("measured.csv");

/// Times of one forward of a model in onnxruntime: float32, batch 1, one thread. Milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// The preset.
    pub preset: String,
    /// The processor.
    pub machine: String,
    /// The published PyTorch code, exported with torch.onnx: every head is computed, and multiplied by 0 where it is off.
    pub published_ms: f64,
    /// Our export without the library.
    pub without_library_ms: f64,
    /// Our export with the library.
    pub library_ms: f64,
}

/// All rows, in the table's order.
pub fn rows() -> Vec<Measured> {
    let mut lines = TABLE.lines().filter(|line| !line.starts_with('#'));
    let machine = lines.next().and_then(|line| line.split_once(',')).map_or("", |(_, machine)| machine);
    let row = |line: &str| {
        let (preset, times) = line.split_once(',')?;
        let times: Vec<f64> = times.split(',').filter_map(|time| time.parse().ok()).collect();
        let [published_ms, without_library_ms, library_ms] = times[..] else { return None };
        let (preset, machine) = (preset.to_owned(), machine.to_owned());
        Some(Measured { preset, machine, published_ms, without_library_ms, library_ms })
    };
    // The first line names the columns.
    lines.skip(1).filter_map(row).collect()
}

/// The row of `preset`, if it was measured.
pub fn of(preset: &str) -> Option<Measured> {
    rows().into_iter().find(|row| row.preset == preset)
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Measured on {} (float32, batch 1, 1 thread, onnxruntime): {} with the library, {} without it, {} for the \
             published code exported with torch.onnx.",
            self.machine,
            ms(self.library_ms),
            ms(self.without_library_ms),
            ms(self.published_ms)
        )
    }
}

fn ms(milliseconds: f64) -> String {
    if milliseconds < 100.0 { format!("{milliseconds:.1} ms") } else { format!("{milliseconds:.0} ms") }
}

/// README's table, in Markdown.
///
/// # Errors
/// A row whose preset cannot be inspected.
pub fn markdown() -> Result<String, Error> {
    let mut text = String::from(
        "| model | heads a token uses | MACs that routing saves | published code, exported with `torch.onnx` \
         | our export without the library | with it | with it / published |\n|---|--:|--:|--:|--:|--:|--:|\n",
    );
    for row in rows() {
        let (config, _) = Preset::named(&row.preset)?.complete()?;
        let (model, tensors) = Model::plan(&config, None)?;
        let inspection = inspect(&model, &tensors, Lengths { tokens: None, past: 0 })?;
        text += &format!(
            "| {} | {:.0} % | {:.1} % | {} | {} | {} | **{:.2}** |\n",
            row.preset,
            100.0 * model.active_share(),
            100.0 * inspection.gain.macs_saved_share,
            ms(row.published_ms),
            ms(row.without_library_ms),
            ms(row.library_ms),
            row.library_ms / row.published_ms
        );
    }
    Ok(text)
}
