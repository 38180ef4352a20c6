//! Measures RoutedAttention on this processor and compares it with the processor's peak.
//!
//! `cargo run --release -p moh-cpu --example attention_bench -- [threads=1] [isa=avx512] [heads=32] [kv_heads=32]
//! [dims=64,128] [lengths=256,512,2048] [dtype=f32] [seconds=0.5]`
//!
//! GFLOP/s count only the operations that gates and mask require, not a kernel's padding. Times are the minimum over
//! all repetitions. Decoding (one query, cache layout) is limited by memory bandwidth, so its rows report bytes of
//! keys and values read.

use moh_conformance::{Buffer, Random};
use moh_cpu::peak::gflops;
use moh_cpu::{Input, Kernel, Threads};
use moh_operators::{Attributes, DType, Data, Definition, RoutedAttention, Tensor, routed_attention};
use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, Instant};

/// Fractions of the heads that a token uses.
const SHARES: [f64; 3] = [1.0, 0.75, 0.5];

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::read(std::env::args().skip(1))?;
    let peak = options.threads as f64 * gflops(options.kernel.isa).unwrap_or(f64::NAN);
    println!(
        "{:?}, {} threads, {} heads over {}, {}; peak {peak:.0} GFLOP/s\n",
        options.kernel, options.threads, options.heads, options.kv_heads, options.dtype
    );
    println!("| mask | head width | tokens | heads used | ms | GFLOP/s | of peak |\n|---|---|---|---|---|---|---|");
    for causal in [false, true] {
        for &dim in &options.dims {
            for &len in &options.lengths {
                for share in SHARES {
                    let case = Case { q_len: len, kv_len: len, dim, causal, cache_layout: false, share };
                    let (time, pairs) = case.measure(&options)?;
                    let flops = 4.0 * (pairs * dim) as f64 / time.as_secs_f64() / 1e9;
                    let mask = if causal { "causal" } else { "full" };
                    let (ms, percent) = (time.as_secs_f64() * 1e3, 100.0 * flops / peak);
                    println!("| {mask} | {dim} | {len} | {share} | {ms:.3} | {flops:.0} | {percent:.0} % |");
                }
            }
        }
    }
    println!("\n| decoding: head width | keys | heads used | ms | GB/s |\n|---|---|---|---|---|");
    for &dim in &options.dims {
        for &len in &options.lengths {
            for share in SHARES {
                let case = Case { q_len: 1, kv_len: len, dim, causal: false, cache_layout: true, share };
                let (time, _) = case.measure(&options)?;
                let heads = used_kv_heads(&case.gates(&options), options.kv_heads);
                let element = if options.dtype == DType::F32 { 4 } else { 2 };
                let rate = (2 * heads * len * dim * element) as f64 / time.as_secs_f64() / 1e9;
                println!("| {dim} | {len} | {share} | {:.3} | {rate:.1} |", time.as_secs_f64() * 1e3);
            }
        }
    }
    Ok(())
}

struct Options {
    threads: usize,
    kernel: &'static Kernel,
    heads: usize,
    kv_heads: usize,
    dims: Vec<usize>,
    lengths: Vec<usize>,
    dtype: DType,
    time: Duration,
}

impl Options {
    fn read(arguments: impl Iterator<Item = String>) -> Result<Options, Box<dyn Error>> {
        let mut given = HashMap::new();
        for argument in arguments {
            let (name, value) = argument.split_once('=').ok_or(format!("expected name=value, found {argument}"))?;
            given.insert(name.to_owned(), value.to_owned());
        }
        let mut take = |name: &str, default: &str| given.remove(name).unwrap_or(default.to_owned());
        let list = |text: String| text.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>();
        let isa = take("isa", "");
        let kernel = moh_cpu::select(RoutedAttention::OPERATOR, Some(isa.as_str()).filter(|isa| !isa.is_empty()));
        let dtype = match take("dtype", "f32").as_str() {
            "f32" => DType::F32,
            "f16" => DType::F16,
            "bf16" => DType::BF16,
            other => return Err(format!("dtype: expected f32, f16 or bf16, found {other}").into()),
        };
        let heads = take("heads", "32");
        let options = Options {
            threads: take("threads", "1").parse()?,
            kernel: kernel.ok_or(format!("isa: this processor does not support {isa}"))?,
            kv_heads: take("kv_heads", &heads).parse()?,
            heads: heads.parse()?,
            dims: list(take("dims", "64,72,128"))?,
            lengths: list(take("lengths", "256,512,2048"))?,
            dtype,
            time: Duration::try_from_secs_f64(take("seconds", "0.5").parse()?)?,
        };
        match given.into_keys().next() {
            Some(unknown) => Err(format!("unknown option {unknown}").into()),
            None => Ok(options),
        }
    }
}

#[derive(Clone, Copy)]
struct Case {
    q_len: usize,
    kv_len: usize,
    dim: usize,
    causal: bool,
    cache_layout: bool,
    share: f64,
}

impl Case {
    /// Every token uses the same number of heads, drawn at random for each token.
    fn gates(&self, options: &Options) -> Vec<f32> {
        let (mut random, used) = (Random(1), (self.share * options.heads as f64).round() as usize);
        let mut gates = Vec::new();
        for _ in 0..self.q_len {
            let mut heads: Vec<(f64, usize)> = (0..options.heads).map(|head| (random.unit(), head)).collect();
            heads.sort_by(|a, b| a.0.total_cmp(&b.0));
            let start = gates.len();
            gates.resize(start + options.heads, 0.0);
            heads[..used].iter().for_each(|&(_, head)| gates[start + head] = 1.0);
        }
        gates
    }

    /// The shortest time, and the number of (query, key, head) triples that gates and mask require.
    fn measure(&self, options: &Options) -> Result<(Duration, usize), Box<dyn Error>> {
        let (heads, kv_heads) = (options.heads, options.kv_heads);
        let attributes = Attributes::new::<RoutedAttention>(routed_attention::Attributes {
            num_heads: heads,
            kv_num_heads: kv_heads,
            scale: 1.0 / (self.dim as f32).sqrt(),
            is_causal: self.causal,
        })?;
        let (q_shape, gates_shape) = ([1, self.q_len, heads * self.dim], [1, self.q_len, heads]);
        let kv_shape = match self.cache_layout {
            true => vec![1, kv_heads, self.kv_len, self.dim],
            false => vec![1, self.kv_len, kv_heads * self.dim],
        };
        let kv_elements = kv_shape.iter().product();
        let mut random = Random(2);
        let mut numbers = |len: usize| {
            let numbers: Vec<f32> = (0..len).map(|_| random.signed()).collect();
            Buffer::new(options.dtype, &numbers)
        };
        let (query, key, value) = (numbers(q_shape.iter().product()), numbers(kv_elements), numbers(kv_elements));
        let gates = self.gates(options);
        let inputs = [
            Some(Tensor { shape: &q_shape, data: query.data() }),
            Some(Tensor { shape: &kv_shape, data: key.data() }),
            Some(Tensor { shape: &kv_shape, data: value.data() }),
            Some(Tensor { shape: &gates_shape, data: Data::F32(&gates) }),
        ]
        .map(|tensor| tensor.map(Input::from));
        let mut output = Buffer::unwritten(options.dtype, q_shape.iter().product());
        let host = Threads::new(options.threads);
        let (start, mut best) = (Instant::now(), Duration::MAX);
        while best == Duration::MAX || start.elapsed() < options.time {
            let begin = Instant::now();
            options.kernel.run(&attributes, &inputs, output.data_mut(), &host)?;
            best = best.min(begin.elapsed());
        }
        let seen = |token: usize| if self.causal { token + 1 + self.kv_len - self.q_len } else { self.kv_len };
        let used = |token: usize| gates[token * heads..(token + 1) * heads].iter().filter(|&&gate| gate != 0.0).count();
        Ok((best, (0..self.q_len).map(|token| seen(token) * used(token)).sum()))
    }
}

fn used_kv_heads(gates: &[f32], kv_heads: usize) -> usize {
    gates.chunks_exact(gates.len() / kv_heads).filter(|gates| gates.iter().any(|&gate| gate != 0.0)).count()
}
