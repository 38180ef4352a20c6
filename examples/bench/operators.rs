//! Single operators against onnxruntime's dense ones.

use crate::cached;
use crate::graphs::{BFLOAT16, Builder, FLOAT, INT32, MICROSOFT, MOH, float, gates, int, random};
use crate::machine;
use crate::measure::{Contender, Settings, Table, Times, Way, alternate};
use anyhow::Result;
use moh_runtime::{Tensor, Value};
use serde_json::Value as Json;

/// Shares of the heads that a token uses.
const SHARES: [f64; 3] = [1.0, 0.75, 0.5];

/// An attention over `len` tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attention {
    pub(crate) batch: usize,
    pub(crate) len: usize,
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    pub(crate) causal: bool,
}

type Inputs = Vec<(String, Value)>;

impl Attention {
    fn shape(&self) -> [usize; 3] {
        [self.batch, self.len, self.heads * self.dim]
    }

    fn scale(&self) -> f32 {
        (self.dim as f32).powf(-0.5)
    }

    fn qkv(&self) -> Builder {
        let shape = self.shape();
        Builder::default()
            .input("q", FLOAT, &shape)
            .input("k", FLOAT, &shape)
            .input("v", FLOAT, &shape)
            .output("o", FLOAT, &shape)
    }

    pub(crate) fn inputs(&self, share: f64) -> Result<Inputs> {
        let used = (share * self.heads as f64).round() as usize;
        let shape = self.shape();
        Ok(vec![
            random("q", &shape)?,
            random("k", &shape)?,
            random("v", &shape)?,
            gates(self.batch, self.len, self.heads, used)?,
            ("past".to_owned(), Tensor::new(vec![self.batch], vec![self.len as i32 - 1; self.batch])?.into()),
            ("total".to_owned(), Tensor::new(vec![1], vec![self.len as i32])?.into()),
        ])
    }

    /// Our operator; with `bf16`, between Casts.
    pub(crate) fn routed(&self, bf16: bool) -> Builder {
        let attributes = vec![
            int("num_heads", self.heads),
            int("kv_num_heads", self.heads),
            float("scale", self.scale()),
            int("is_causal", usize::from(self.causal)),
        ];
        let graph = self.qkv().input("gates", FLOAT, &[self.batch, self.len, self.heads]);
        if !bf16 {
            return graph.node(MOH, "RoutedAttention", "q k v gates", "o", attributes);
        }
        let cast = |graph: Builder, from: &str, to: &str, ty: i32| {
            graph.node("", "Cast", from, to, vec![int("to", ty as usize)])
        };
        let graph = cast(cast(cast(graph, "q", "q16", BFLOAT16), "k", "k16", BFLOAT16), "v", "v16", BFLOAT16);
        cast(graph.node(MOH, "RoutedAttention", "q16 k16 v16 gates", "o16", attributes), "o16", "o", FLOAT)
    }

    pub(crate) fn multi_head(&self) -> Builder {
        let attributes = vec![
            int("num_heads", self.heads),
            float("scale", self.scale()),
            int("unidirectional", usize::from(self.causal)),
        ];
        self.qkv().node(MICROSOFT, "MultiHeadAttention", "q k v", "o", attributes)
    }

    fn onnx(&self) -> Builder {
        let attributes = vec![
            int("q_num_heads", self.heads),
            int("kv_num_heads", self.heads),
            float("scale", self.scale()),
            int("is_causal", usize::from(self.causal)),
        ];
        self.qkv().node("", "Attention", "q k v", "o", attributes)
    }

    fn grouped(&self) -> Builder {
        let attributes =
            vec![int("num_heads", self.heads), int("kv_num_heads", self.heads), float("scale", self.scale())];
        let present = [self.batch, self.heads, self.len, self.dim];
        self.qkv()
            .input("past", INT32, &[self.batch])
            .input("total", INT32, &[1])
            .output("pk", FLOAT, &present)
            .output("pv", FLOAT, &present)
            .node(MICROSOFT, "GroupQueryAttention", "q k v - - past total", "o pk pv", attributes)
    }

    /// GFLOP of the dense product.
    fn gflop(&self) -> f64 {
        let pairs = if self.causal { self.len * (self.len + 1) / 2 } else { self.len * self.len };
        4.0 * (self.batch * self.heads * self.dim * pairs) as f64 / 1e9
    }
}

/// Times of several graphs on their inputs, in turns.
pub(crate) fn times(graphs: Vec<(Builder, Way, Inputs)>, threads: usize, settings: &Settings) -> Result<Vec<Times>> {
    let folder = tempfile::tempdir()?;
    let mut contenders = Vec::new();
    for (i, (graph, way, inputs)) in graphs.into_iter().enumerate() {
        let path = folder.path().join(format!("{i}.onnx"));
        graph.write(&path)?;
        contenders.push(Contender::new(&path, way, threads, inputs)?);
    }
    alternate(&mut contenders, settings.time)
}

pub(crate) fn run(settings: &Settings, tables: &mut Vec<Json>) -> Result<()> {
    for (name, section) in [
        ("attention", attention as fn(&Settings, &mut Vec<Json>) -> Result<()>),
        ("causal", causal),
        ("bf16", bf16),
        ("decode", decode),
        ("cached prefill", cached::prefill),
        ("projections", projections),
    ] {
        if settings.wants(name) {
            section(settings, tables)?;
        }
    }
    Ok(())
}

/// One routed attention at every share, beside dense operators whose best is the peer.
fn shares(case: Attention, peers: Vec<Builder>, threads: usize, settings: &Settings) -> Result<(Times, [Times; 3])> {
    let mut graphs = Vec::new();
    for share in SHARES {
        graphs.push((case.routed(false), Way::Library, case.inputs(share)?));
    }
    for peer in peers {
        graphs.push((peer, Way::Alone, case.inputs(1.0)?));
    }
    let times = times(graphs, threads, settings)?;
    let best = times[3..].iter().copied().min_by(|a, b| a.min.total_cmp(&b.min)).unwrap_or(times[0]);
    Ok((best, [times[0], times[1], times[2]]))
}

const COLUMNS: [&str; 9] = [
    "threads",
    "head width",
    "tokens",
    "dense ms",
    "all heads ms",
    "75 % ms",
    "50 % ms",
    "ratios",
    "of peak, all heads",
];

fn attention(settings: &Settings, tables: &mut Vec<Json>) -> Result<()> {
    let mut table = Table::new("RoutedAttention against MultiHeadAttention, 32 heads, f32", &COLUMNS, tables);
    rows(settings, &mut table, false, |case| vec![case.multi_head()])
}

fn causal(settings: &Settings, tables: &mut Vec<Json>) -> Result<()> {
    let name = "Causal RoutedAttention against the best of MultiHeadAttention, Attention and GroupQueryAttention, 32 heads, f32";
    let mut table = Table::new(name, &COLUMNS, tables);
    rows(settings, &mut table, true, |case| vec![case.multi_head(), case.onnx(), case.grouped()])
}

fn rows(
    settings: &Settings,
    table: &mut Table<'_>,
    causal: bool,
    peers: impl Fn(Attention) -> Vec<Builder>,
) -> Result<()> {
    for &threads in &settings.threads {
        let peak = machine::peak(threads);
        for dim in [64, 72, 128] {
            for len in [256, 512, 2048] {
                let case = Attention { batch: 1, len, heads: 32, dim, causal };
                let (dense, ours) = shares(case, peers(case), threads, settings)?;
                let ratios = ours.map(|times| format!("{:.2}", times.min / dense.min)).join(" / ");
                let of_peak = format!("{:.0} %", 100.0 * case.gflop() / ours[0].min / peak);
                let [all, most, half] = ours.map(|times| times.cell());
                let cells = [
                    threads.to_string(),
                    dim.to_string(),
                    len.to_string(),
                    dense.cell(),
                    all,
                    most,
                    half,
                    ratios,
                    of_peak,
                ];
                table.row(&cells);
            }
        }
    }
    Ok(())
}

fn bf16(settings: &Settings, tables: &mut Vec<Json>) -> Result<()> {
    let columns = ["threads", "head width", "tokens", "f32 ms", "bf16 with Casts ms", "ratio"];
    let mut table = Table::new("RoutedAttention in bf16 between Casts against f32, 32 heads, 75 %", &columns, tables);
    for &threads in &settings.threads {
        for dim in [64, 128] {
            for len in [256, 512, 2048] {
                let case = Attention { batch: 1, len, heads: 32, dim, causal: false };
                let graphs = [false, true].map(|bf16| Ok((case.routed(bf16), Way::Library, case.inputs(0.75)?)));
                let times = times(graphs.into_iter().collect::<Result<_>>()?, threads, settings)?;
                let ratio = format!("{:.2}", times[1].min / times[0].min);
                table.row(&[
                    threads.to_string(),
                    dim.to_string(),
                    len.to_string(),
                    times[0].cell(),
                    times[1].cell(),
                    ratio,
                ]);
            }
        }
    }
    Ok(())
}

/// One query with a cache of 2048 keys: ours appends with Concat, as exported models do.
fn decode(settings: &Settings, tables: &mut Vec<Json>) -> Result<()> {
    const PAST: usize = 2047;
    const HEADS: usize = 32;
    const DIM: usize = 64;
    let columns = [
        "threads",
        "heads over KV heads",
        "heads used",
        "GroupQueryAttention ms",
        "Concat + RoutedAttention ms",
        "ratio",
    ];
    let mut table =
        Table::new("Decoding, 1 query, 2048 keys, head width 64, f32, with the cache's growth", &columns, tables);
    for &threads in &settings.threads {
        for (kv_heads, share) in [(32, 0.5), (32, 0.75), (8, 0.75)] {
            let (q, kv) = ([1, 1, HEADS * DIM], [1, 1, kv_heads * DIM]);
            let (past, present) = ([1, kv_heads, PAST, DIM], [1, kv_heads, PAST + 1, DIM]);
            let caches = |graph: Builder| {
                let graph = graph.input("pastk", FLOAT, &past).input("pastv", FLOAT, &past);
                graph.output("o", FLOAT, &q).output("pk", FLOAT, &present).output("pv", FLOAT, &present)
            };
            let scale = float("scale", (DIM as f32).powf(-0.5));
            let counts = vec![int("num_heads", HEADS), int("kv_num_heads", kv_heads), scale];
            let dense = caches(Builder::default().input("q", FLOAT, &q).input("k", FLOAT, &kv).input("v", FLOAT, &kv))
                .input("past", INT32, &[1])
                .input("total", INT32, &[1])
                .node(MICROSOFT, "GroupQueryAttention", "q k v pastk pastv past total", "o pk pv", counts.clone());
            // With one token, (batch, 1, heads * dim) and (batch, heads, 1, dim) are the same numbers.
            let one = [1, kv_heads, 1, DIM];
            let ours =
                caches(Builder::default().input("q", FLOAT, &q).input("k4", FLOAT, &one).input("v4", FLOAT, &one))
                    .input("gates", FLOAT, &[1, 1, HEADS])
                    .node("", "Concat", "pastk k4", "pk", vec![int("axis", 2)])
                    .node("", "Concat", "pastv v4", "pv", vec![int("axis", 2)])
                    .node(MOH, "RoutedAttention", "q pk pv gates", "o", [counts, vec![int("is_causal", 1)]].concat());
            let inputs = vec![
                random("q", &q)?,
                random("k", &kv)?,
                random("v", &kv)?,
                random("k4", &one)?,
                random("v4", &one)?,
                random("pastk", &past)?,
                random("pastv", &past)?,
                ("past".to_owned(), Tensor::new(vec![1], vec![PAST as i32])?.into()),
                ("total".to_owned(), Tensor::new(vec![1], vec![PAST as i32 + 1])?.into()),
                gates(1, 1, HEADS, (share * HEADS as f64) as usize)?,
            ];
            let times =
                times(vec![(dense, Way::Alone, inputs.clone()), (ours, Way::Library, inputs)], threads, settings)?;
            table.row(&[
                threads.to_string(),
                format!("{HEADS} over {kv_heads}"),
                format!("{:.0} %", 100.0 * share),
                times[0].cell(),
                times[1].cell(),
                format!("{:.2}", times[1].min / times[0].min),
            ]);
        }
    }
    Ok(())
}

/// The query and the output projection of a layer, against two MatMuls.
fn projections(settings: &Settings, tables: &mut Vec<Json>) -> Result<()> {
    let columns = [
        "threads",
        "width",
        "tokens",
        "dense ms",
        "all heads ms",
        "75 % ms",
        "50 % ms",
        "ratios",
        "75 % packed once ms",
        "ratios packed once",
    ];
    let mut table = Table::new("RoutedProjection + RoutedCombine against two MatMuls, f32", &columns, tables);
    for &threads in &settings.threads {
        for (heads, dim, len) in [(32, 64, 256), (16, 72, 256), (16, 72, 4096), (12, 32, 196)] {
            let width = heads * dim;
            let shape = [1, len, width];
            let io = |graph: Builder| graph.input("q", FLOAT, &shape).output("o", FLOAT, &shape);
            let counts = || vec![int("num_heads", heads), int("weight_layout", 0)];
            let ours = || {
                io(Builder::default())
                    .input("gates", FLOAT, &[1, len, heads])
                    .weight("w1", &[width, width])
                    .weight("w2", &[width, width])
                    .node(MOH, "RoutedProjection", "q w1 gates", "m", counts())
                    .node(MOH, "RoutedCombine", "m w2 gates", "o", counts())
            };
            let dense = io(Builder::default())
                .weight("w1", &[width, width])
                .weight("w2", &[width, width])
                .node("", "MatMul", "q w1", "m", vec![])
                .node("", "MatMul", "m w2", "o", vec![]);
            let inputs = |share: f64| -> Result<Inputs> {
                Ok(vec![random("q", &shape)?, gates(1, len, heads, (share * heads as f64).round() as usize)?])
            };
            let mut graphs = vec![(dense, Way::Alone, inputs(1.0)?)];
            for way in [Way::Library, Way::Packed] {
                for share in SHARES {
                    graphs.push((ours(), way, inputs(share)?));
                }
            }
            let times = times(graphs, threads, settings)?;
            let dense_time = times[0].min;
            let (packing, packed) = times[1..].split_at(SHARES.len());
            let ratios = |times: &[Times]| {
                times.iter().map(|t| format!("{:.2}", t.min / dense_time)).collect::<Vec<_>>().join(" / ")
            };
            let head = [threads.to_string(), width.to_string(), len.to_string(), times[0].cell()];
            let cells = packing.iter().map(Times::cell).chain([ratios(packing), packed[1].cell(), ratios(packed)]);
            table.row(&head.into_iter().chain(cells).collect::<Vec<_>>());
        }
    }
    Ok(())
}
