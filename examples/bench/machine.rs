//! The machine under the benchmark: its name, and the speed that its multiply-add instructions reach.

#[path = "../../custom-ops/core/examples/support/peak.rs"]
mod peak;

use moh_kernels::cpu;
use moh_kernels::schema::ROUTED_ATTENTION;

/// GFLOP/s of `threads` threads in f32 multiply-adds on registers, all at the same time.
pub(crate) fn peak(threads: usize) -> f64 {
    let isa = cpu::select(&ROUTED_ATTENTION, None).map_or("portable", |kernel| kernel.isa);
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..threads).map(|_| scope.spawn(|| peak::peak(isa))).collect();
        runs.into_iter().filter_map(|run| run.join().ok()).sum()
    })
}

/// Processor, instruction set, peak and versions, for the head of the tables.
pub(crate) fn description(threads: &[usize]) -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name =
        text.lines().find_map(|line| line.strip_prefix("model name")).map(|rest| rest.trim_matches([' ', '\t', ':']));
    let isa = cpu::select(&ROUTED_ATTENTION, None).map_or("portable", |kernel| kernel.isa);
    let peaks = threads.iter().map(|&n| format!("{:.0} on {n}", peak(n))).collect::<Vec<_>>().join(", ");
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    format!(
        "{}, {processors} processors; kernels: {isa}; f32 multiply-adds, GFLOP/s by threads: {peaks}.",
        name.unwrap_or("unknown processor")
    )
}
