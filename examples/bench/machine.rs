//! The machine under the benchmark: its name, and the speed that its multiply-add instructions reach.

use moh_cpu::peak::gflops;
use moh_operators::{Definition, RoutedAttention};
use std::time::Instant;

/// The instruction set of the kernels.
fn isa() -> &'static str {
    moh_cpu::select(RoutedAttention::OPERATOR, None).map_or("portable", |kernel| kernel.isa)
}

/// GFLOP/s of `threads` threads in f32 multiply-adds on registers, all at the same time.
pub(crate) fn peak(threads: usize) -> f64 {
    let isa = isa();
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..threads).map(|_| scope.spawn(|| gflops(isa))).collect();
        runs.into_iter().filter_map(|run| run.join().ok().flatten()).sum()
    })
}

/// Processor, instruction set, peak and versions, for the head of the tables.
pub(crate) fn description(threads: &[usize]) -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name =
        text.lines().find_map(|line| line.strip_prefix("model name")).map(|rest| rest.trim_matches([' ', '\t', ':']));
    let isa = isa();
    let peaks = threads.iter().map(|&n| format!("{:.0} on {n}", peak(n))).collect::<Vec<_>>().join(", ");
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    format!(
        "{}, {processors} processors; kernels: {isa}; f32 multiply-adds, GFLOP/s by threads: {peaks}.",
        name.unwrap_or("unknown processor")
    )
}

/// What is read to find the memory's bandwidth: far more than caches hold.
const READ: usize = 1 << 30;

/// GB/s at which `threads` threads read memory, all at the same time: the best of a few passes.
pub(crate) fn bandwidth(threads: usize) -> f64 {
    let numbers = vec![1u64; READ / size_of::<u64>()];
    let pass = || {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for part in numbers.chunks(numbers.len().div_ceil(threads)) {
                scope.spawn(|| std::hint::black_box(sum(part)));
            }
        });
        READ as f64 / start.elapsed().as_secs_f64() / 1e9
    };
    (0..8).map(|_| pass()).fold(0.0, f64::max)
}

/// From several places at once: a processor's own prefetching ends with each page. In several sums, which the compiler keeps in vectors.
fn sum(numbers: &[u64]) -> u64 {
    const PLACES: usize = 8;
    const LINE: usize = 8;
    let mut sums = [0u64; LINE];
    let places: Vec<&[u64]> = numbers.chunks_exact(numbers.len() / PLACES).collect();
    for at in (0..numbers.len() / PLACES / LINE * LINE).step_by(LINE) {
        for place in &places {
            sums.iter_mut().zip(&place[at..at + LINE]).for_each(|(sum, number)| *sum = sum.wrapping_add(*number));
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}
