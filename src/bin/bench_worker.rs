//! One side of `ci/bench.sh --against`: `bench_worker MODEL library|packed|alone|tract THREADS SHARE [SYMBOL=SIZE ...]` loads a
//! model and prints `ready`. For each line of standard input, a number, it runs the model so often and prints the seconds.
//!
//! Inputs follow from the model's declarations alone. The one called `gates` is 1 for a random SHARE of each token's heads, else 0.
//!
//! It is also compiled with the sources of the other revision: it may use only what `moh_runtime` has had for long.

use anyhow::{Context, Result, bail, ensure};
use moh_runtime::{Dim, ElementType, Model, Options, RuntimeChoice, Tensor, TensorInfo, Value};
use std::time::Instant;

const USAGE: &str = "usage: bench_worker MODEL library|packed|alone|tract THREADS SHARE [SYMBOL=SIZE ...]";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, way, threads, share, sizes @ ..] = arguments.as_slice() else { bail!(USAGE) };
    ensure!(["library", "packed", "alone", "tract"].contains(&way.as_str()), "{USAGE}");
    let options = Options {
        runtime: if way == "tract" { RuntimeChoice::Tract } else { RuntimeChoice::Ort },
        threads: Some(threads.parse().context("THREADS")?),
        without_custom_ops: way == "alone",
        pack_weights: way == "packed",
        ..Options::default()
    };
    let mut model = Model::load(model, &options)?;
    // Without the library both sides would run the same bodies.
    ensure!(way == "alone" || model.notices().is_empty(), "{}", model.notices()[0]);
    let share = share.parse().context("SHARE")?;
    let inputs = model.inputs().iter().map(|info| input(info, share, sizes)).collect::<Result<Vec<_>>>()?;

    println!("ready");
    for line in std::io::stdin().lines() {
        let calls = line?.trim().parse().context("expected a number of calls")?;
        let mut seconds = Vec::new();
        for _ in 0..calls {
            let inputs = inputs.clone();
            let start = Instant::now();
            let outputs = model.run(inputs)?;
            seconds.push(start.elapsed().as_secs_f64().to_string());
            drop(outputs);
        }
        println!("{}", seconds.join(" "));
    }
    Ok(())
}

/// Gates, a mask that hides nothing, counted up integers (tokens, positions), or random numbers of variance 1.
fn input(info: &TensorInfo, share: f64, sizes: &[String]) -> Result<(String, Value)> {
    let dims = info.dims.iter().map(|dim| size(dim, sizes).with_context(|| info.to_string()));
    let dims = dims.collect::<Result<Vec<usize>>>()?;
    let count: usize = dims.iter().product();
    let seed = info.name.bytes().map(u64::from).sum();
    let tensor = match (info.element_type, info.name.as_str()) {
        (ElementType::F32, "gates") => {
            let heads = *dims.last().context("gates without dimensions")?;
            Tensor::new(dims, gates(count, heads, (share * heads as f64).round() as usize, Random(seed)))?
        }
        (ElementType::F32, _) => {
            let mut random = Random(seed);
            Tensor::new(dims, (0..count).map(|_| (random.uniform() - 0.5) * 12f32.sqrt()).collect())?
        }
        (ElementType::I64, "attention_mask") => Tensor::new(dims, vec![1i64; count])?,
        (ElementType::I64, _) => Tensor::new(dims, (0..count as i64).collect())?,
        _ => bail!("{info}: expected float32 or int64"),
    };
    Ok((info.name.clone(), tensor.into()))
}

fn size(dim: &Dim, sizes: &[String]) -> Result<usize> {
    match dim {
        Dim::Fixed(size) => Ok(*size),
        Dim::Symbol(name) => {
            let given = sizes.iter().filter_map(|size| size.split_once('=')).find(|(symbol, _)| symbol == name);
            given.with_context(|| format!("no size for {name}"))?.1.parse().with_context(|| format!("size of {name}"))
        }
    }
}

fn gates(count: usize, heads: usize, used: usize, mut random: Random) -> Vec<f32> {
    let mut gates = vec![0f32; count];
    for token in gates.chunks_mut(heads) {
        let mut order: Vec<(f32, usize)> = (0..heads).map(|head| (random.uniform(), head)).collect();
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        order[..used].iter().for_each(|&(_, head)| token[head] = 1.0);
    }
    gates
}

/// SplitMix64.
struct Random(u64);

impl Random {
    /// From 0 to 1.
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32
    }
}
