//! The machine under the benchmark: its name, and the speed that its multiply-add instructions reach.

use moh_cpu::peak::gflops;
use moh_operators::{Definition, RoutedAttention};

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
