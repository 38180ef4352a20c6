//! Measures products with weights in blocks of 4 or 8 bits, beside a plain read of as many bytes.
//!
//! `cargo run --release -p moh-cpu --example nbits_bench -- [threads=1] [shapes=4096x4096,14336x4096] [rows=1,4,512]
//! [bits=4,8] [blocks=32,128] [levels=4,0] [megabytes=1000] [seconds=1]`
//!
//! A shape is output columns x inner indices. Weights take turns, so that none is in a cache when it is multiplied: together
//! they have as many megabytes. Scales are f32. Times are the minimum over all repetitions and include starting the threads.

use moh_conformance::Random;
use moh_cpu::nbits::{Level, NBits, linear};
use moh_cpu::{Host, Threads};
use std::collections::HashMap;
use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::read(std::env::args().skip(1))?;
    println!("{} threads\n", options.threads);
    println!("| columns x inner | bits | block | level | rows | ms | GMAC/s | GB/s | of a plain read |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for &[n, k] in &options.shapes {
        for &bits in &options.bits {
            for &block in &options.blocks {
                let weights = Weights::new(n, k, bits, block, options.megabytes);
                for &level in &options.levels {
                    for &rows in &options.rows {
                        weights.measure(rows, level as i64, &options)?;
                    }
                }
            }
        }
    }
    Ok(())
}

struct Options {
    threads: usize,
    shapes: Vec<[usize; 2]>,
    rows: Vec<usize>,
    bits: Vec<usize>,
    blocks: Vec<usize>,
    levels: Vec<usize>,
    megabytes: usize,
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
        let shape = |text: &str| -> Result<[usize; 2], Box<dyn Error>> {
            let (n, k) = text.split_once('x').ok_or(format!("shapes: expected columns x inner, found {text}"))?;
            Ok([n.parse()?, k.parse()?])
        };
        let options = Options {
            threads: take("threads", "1").parse()?,
            shapes: take("shapes", "4096x4096,14336x4096").split(',').map(shape).collect::<Result<_, _>>()?,
            rows: list(take("rows", "1,4,512"))?,
            bits: list(take("bits", "4,8"))?,
            blocks: list(take("blocks", "32,128"))?,
            levels: list(take("levels", "4,0"))?,
            megabytes: take("megabytes", "1000").parse()?,
            time: Duration::try_from_secs_f64(take("seconds", "1").parse()?)?,
        };
        match given.into_keys().next() {
            Some(unknown) => Err(format!("unknown option {unknown}").into()),
            None => Ok(options),
        }
    }
}

/// Matrices of one shape and format.
struct Weights {
    shape: [usize; 2],
    bits: usize,
    block: usize,
    matrices: Vec<(Vec<u8>, Vec<f32>)>,
}

impl Weights {
    fn new(n: usize, k: usize, bits: usize, block: usize, megabytes: usize) -> Weights {
        let (bytes, blocks) = (n * k * bits / 8, n * k / block);
        let count = (megabytes * 1_000_000 / (bytes + 4 * blocks).max(1)).max(1);
        let mut random = Random(1);
        let data: Vec<u8> = (0..bytes).map(|_| random.bits() as u8).collect();
        let scales: Vec<f32> = (0..blocks).map(|_| 0.01 * random.signed()).collect();
        Weights { shape: [n, k], bits, block, matrices: vec![(data, scales); count] }
    }

    fn measure(&self, rows: usize, level: i64, options: &Options) -> Result<(), Box<dyn Error>> {
        let ([n, k], host) = (self.shape, Threads::new(options.threads));
        let mut random = Random(2);
        let x: Vec<f32> = (0..rows * k).map(|_| random.signed()).collect();
        let mut out = vec![0.0f32; rows * n];
        let (start, mut best, mut plain) = (Instant::now(), Duration::MAX, Duration::MAX);
        while start.elapsed() < options.time || plain == Duration::MAX {
            for (i, (data, scales)) in self.matrices.iter().enumerate() {
                let weight = NBits::new("nbits_bench", self.bits, self.block, self.shape, data, scales, None)?;
                let begin = Instant::now();
                linear("nbits_bench", &x, &weight, None, &mut out, Level::of(level), &host)?;
                best = best.min(begin.elapsed());
                let begin = Instant::now();
                read(&self.matrices[(i + 1) % self.matrices.len()].0, &host);
                plain = plain.min(begin.elapsed());
            }
        }
        let rate = |bytes: usize, time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
        let bytes = n * k * self.bits / 8;
        let all = rate(bytes + 4 * n * k / self.block, best);
        let share = 100.0 * all / rate(bytes, plain);
        let (ms, macs) = (best.as_secs_f64() * 1e3, rate(rows * n * k, best));
        let (bits, block) = (self.bits, self.block);
        println!("| {n} x {k} | {bits} | {block} | {level} | {rows} | {ms:.3} | {macs:.1} | {all:.1} | {share:.0} % |");
        Ok(())
    }
}

/// Reads every cache line.
fn read(data: &[u8], host: &dyn Host) {
    const PART: usize = 1 << 20;
    host.parallel_for(data.len().div_ceil(PART), &|part| {
        let words = data[part * PART..].chunks_exact(8).take(PART / 8);
        black_box(words.fold(0u64, |sum, word| sum ^ u64::from_le_bytes(word.try_into().unwrap_or([0; 8]))));
    });
}
