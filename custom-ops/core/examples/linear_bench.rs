//! RoutedProjection and RoutedCombine beside two dense MatMul of onnxruntime, in one process, by turns.
//!
//! `ORT_DYLIB_PATH=libonnxruntime.so cargo run --release -p moh-kernels --example linear_bench -- [width=2048] [heads=32]
//! [dim=64] [tokens=256] [shares=1,0.75,0.5] [threads=1] [isa=avx512] [layout=0] [seconds=1]`
//!
//! A pair is one call of each: x (tokens, width) to heads and back. Times are the shortest and the median of all
//! repetitions, ratios those of our times to onnxruntime's.

#[path = "support/onnxruntime.rs"]
mod onnxruntime;

use moh_kernels::schema::{Operator, ROUTED_COMBINE, ROUTED_PROJECTION, Value};
use moh_kernels::{Attributes, Data, DataMut, Tensor, Threads, cpu};
use onnxruntime::{Graph, Input, Peer};
use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn Error>> {
    let mut given = HashMap::new();
    for argument in std::env::args().skip(1) {
        let (name, value) = argument.split_once('=').ok_or(format!("expected name=value, found {argument}"))?;
        given.insert(name.to_owned(), value.to_owned());
    }
    let mut take = |name: &str, default: &str| given.remove(name).unwrap_or(default.to_owned());
    let (width, heads, dim) =
        (take("width", "2048").parse()?, take("heads", "32").parse()?, take("dim", "64").parse()?);
    let tokens: Vec<usize> = list(&take("tokens", "256"))?;
    let shares: Vec<f64> = list(&take("shares", "1,0.75,0.5"))?;
    let threads: Vec<usize> = list(&take("threads", "1"))?;
    let (isa, layout) = (take("isa", ""), take("layout", "0").parse()?);
    let time = Duration::try_from_secs_f64(take("seconds", "1").parse()?)?;
    if let Some(unknown) = given.into_keys().next() {
        return Err(format!("unknown option {unknown}").into());
    }
    println!(
        "| tokens | heads used | threads | ours, ms: min, median | onnxruntime | ratio |\n|---|---|---|---|---|---|"
    );
    for &threads in &threads {
        for &tokens in &tokens {
            for &share in &shares {
                let case = Case { width, heads, dim, tokens, share, layout, isa: &isa, threads };
                let [ours, theirs] = case.measure(time)?;
                let ratio = [ours[0] / theirs[0], ours[1] / theirs[1]];
                println!(
                    "| {tokens} | {share} | {threads} | {:.3}, {:.3} | {:.3}, {:.3} | {:.3}, {:.3} |",
                    ours[0], ours[1], theirs[0], theirs[1], ratio[0], ratio[1]
                );
            }
        }
    }
    Ok(())
}

fn list<T: std::str::FromStr>(text: &str) -> Result<Vec<T>, T::Err> {
    text.split(',').map(str::parse).collect()
}

struct Case<'a> {
    width: usize,
    heads: usize,
    dim: usize,
    tokens: usize,
    share: f64,
    layout: i64,
    isa: &'a str,
    threads: usize,
}

impl Case<'_> {
    /// Shortest and median time in ms of ours and of onnxruntime's.
    fn measure(&self, time: Duration) -> Result<[[f64; 2]; 2], Box<dyn Error>> {
        let (width, inner, tokens) = (self.width, self.heads * self.dim, self.tokens);
        let mut random = Random(2);
        let mut numbers = |len: usize| (0..len).map(|_| (random.unit() * 2.0 - 1.0) as f32).collect::<Vec<f32>>();
        let (x, first, second) = (numbers(tokens * width), numbers(inner * width), numbers(width * inner));
        let gates = self.gates();
        let mut peer = self.peer(&first, &second)?;
        let host = Threads::new(self.threads);
        let (mut hidden, mut output) = (vec![0.0; tokens * inner], vec![0.0; tokens * width]);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let start = Instant::now();
        while ours.len() < 3 || start.elapsed() < time {
            let begin = Instant::now();
            let first_shape: &[usize] = if self.layout == 0 { &[inner, width] } else { &[self.heads, width, self.dim] };
            let second_shape: &[usize] =
                if self.layout == 0 { &[width, inner] } else { &[self.heads, self.dim, width] };
            self.call(&ROUTED_PROJECTION, (&x, width), (&first, first_shape), &gates, &mut hidden, &host)?;
            self.call(&ROUTED_COMBINE, (&hidden, inner), (&second, second_shape), &gates, &mut output, &host)?;
            ours.push(begin.elapsed().as_secs_f64() * 1e3);
            let begin = Instant::now();
            peer.run(&[(vec![1, tokens, width], Input::Float(&x))])?;
            theirs.push(begin.elapsed().as_secs_f64() * 1e3);
        }
        Ok([ours, theirs].map(|mut times| {
            times.sort_by(f64::total_cmp);
            [times[0], times[times.len() / 2]]
        }))
    }

    fn call(
        &self,
        operator: &'static Operator,
        (x, columns): (&[f32], usize),
        (weight, shape): (&[f32], &[usize]),
        gates: &[f32],
        output: &mut [f32],
        host: &Threads,
    ) -> Result<(), Box<dyn Error>> {
        let attributes = Attributes::read(operator, |def| match def.name {
            "num_heads" => Some(Value::Int(self.heads as i64)),
            _ => Some(Value::Int(self.layout)),
        })?;
        let isa = Some(self.isa).filter(|isa| !isa.is_empty());
        let kernel = cpu::select(operator, isa).ok_or(format!("isa: this processor does not support {}", self.isa))?;
        let inputs = [
            Some(Tensor { shape: &[1, self.tokens, columns], data: Data::F32(x) }),
            Some(Tensor { shape, data: Data::F32(weight) }),
            Some(Tensor { shape: &[1, self.tokens, self.heads], data: Data::F32(gates) }),
        ];
        kernel.run(&attributes, &inputs, DataMut::F32(output), host)?;
        Ok(())
    }

    /// Two MatMul, whose constant weights onnxruntime packs when it loads them.
    fn peer(&self, first: &[f32], second: &[f32]) -> Result<Peer, Box<dyn Error>> {
        let (width, inner, tokens) = (self.width, self.heads * self.dim, self.tokens);
        Graph::default()
            .input("x", &[1, tokens, width])
            .constant("first", &[width, inner], first)
            .constant("second", &[inner, width], second)
            .node("", "MatMul", &["x", "first"], &["hidden"], &[])
            .node("", "MatMul", &["hidden", "second"], &["y"], &[])
            .output("y", &[1, tokens, width])
            .load(self.threads)
    }

    /// Every token uses the same number of heads, drawn anew for each.
    fn gates(&self) -> Vec<f32> {
        let (mut random, used) = (Random(1), (self.share * self.heads as f64).round() as usize);
        let mut gates = Vec::new();
        for _ in 0..self.tokens {
            let mut heads: Vec<(f64, usize)> = (0..self.heads).map(|head| (random.unit(), head)).collect();
            heads.sort_by(|a, b| a.0.total_cmp(&b.0));
            let start = gates.len();
            gates.resize(start + self.heads, 0.0);
            heads[..used].iter().for_each(|&(_, head)| gates[start + head] = 1.0);
        }
        gates
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
