//! Malformed nodes of every operator through onnxruntime with `libmoh_ops.so`, and through tract: an error or a result, never a crash, never a
//! leak, and the same result in both.
//!
//! usage: attack [FROM] [TO]      (numbers of nodes; default: 0 5000)
//!        attack --show NUMBER
//!
//! Each number is a node, the same every time. They run in child processes, a few hundred each, so that a crash is seen and its node named.
//! `ORT_DYLIB_PATH` and `MOH_OPS_LIBRARY` name the libraries. Prints a table, and exits with 1 where something was found.

// The fuzz targets use these modules, too.
#![allow(unreachable_pub, dead_code)]

mod choices;
mod nodes;
mod onnx;
mod panics;

use anyhow::{Context, Result, bail, ensure};
use choices::Choices;
use moh_models::sample::Rng;
use moh_runtime::{Model, Options, RuntimeChoice, Tensor, Value};
use std::path::Path;
use std::process::{Command, ExitCode};

/// Nodes of a child process.
const BATCH: u64 = 250;
/// Bytes that a node is made of.
const BYTES: usize = 512;
/// How often a child runs its nodes: memory may grow in the first half.
const ROUNDS: usize = 6;
/// Bytes of memory by which a child may grow in the second half of its rounds: what allocators keep.
const GROWTH: usize = 4 << 20;
/// The largest difference between the runtimes, in units of the largest value or of 1.
const TOLERANCE: f32 = 1e-3;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: u64| arguments.get(i).map_or(Ok(default), |text| text.parse::<u64>());
    let found = match arguments.first().map(String::as_str) {
        Some("--show") => number(1, 0).context("expected a number").map(|number| println!("{:#?}", call(number))),
        Some("--child") => number(1, 0).and_then(|from| Ok((from, number(2, 0)?))).context("numbers").and_then(child),
        _ => {
            number(0, 0).and_then(|from| Ok((from, number(1, 5000)?))).context("expected FROM and TO").and_then(parent)
        }
    };
    match found {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("attack: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs children, and adds up what they say.
fn parent((from, to): (u64, u64)) -> Result<()> {
    let (mut failed, mut sums) = (0, [0u64; 4]);
    for begin in (from..to).step_by(BATCH as usize) {
        let end = (begin + BATCH).min(to);
        let numbers = [begin.to_string(), end.to_string()];
        let output = Command::new(std::env::current_exe()?).arg("--child").args(&numbers).output()?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let last = out.lines().last().unwrap_or_default();
        if !output.status.success() || err.contains("panicked") {
            failed += 1;
            println!("FAILED nodes {begin} to {end}: {}, after {last:?}: {}", output.status, err.trim());
            continue;
        }
        for (sum, word) in sums.iter_mut().zip(last.split(' ')) {
            *sum += word.parse::<u64>().with_context(|| format!("a child said {last:?}"))?;
        }
    }
    let [nodes, onnxruntime, tract, both] = sums;
    println!(
        "| nodes | results of onnxruntime | of tract | of both, compared | batches that failed |\n|--:|--:|--:|--:|--:|"
    );
    println!("| {nodes} | {onnxruntime} | {tract} | {both} | {failed} |");
    ensure!(failed == 0, "{failed} batches failed");
    Ok(())
}

/// Runs nodes in both runtimes, several times, and says how many gave results; the node before each run, for the parent to name it.
fn child((from, to): (u64, u64)) -> Result<()> {
    panics::end_the_process();
    let folder = tempfile::tempdir()?;
    let (mut sums, mut memory) = ([0u64; 4], 0);
    for round in 0..ROUNDS {
        sums = [0; 4];
        for number in from..to {
            println!("node {number}");
            let Some((bytes, given)) = node(number) else { continue };
            let path = folder.path().join("model.onnx");
            std::fs::write(&path, bytes)?;
            let ours = run(&path, RuntimeChoice::Ort, &given);
            let theirs = run(&path, RuntimeChoice::Tract, &given);
            sums[0] += 1;
            sums[1] += u64::from(ours.is_some());
            sums[2] += u64::from(theirs.is_some());
            if let (Some(ours), Some(theirs)) = (ours, theirs) {
                compare(number, &ours, &theirs, !is_others(number))?;
                sums[3] += 1;
            }
        }
        if round == ROUNDS / 2 - 1 {
            memory = resident()?;
        }
    }
    let grown = resident()?.saturating_sub(memory);
    ensure!(grown < GROWTH, "{} rounds took {grown} bytes more memory", ROUNDS - ROUNDS / 2);
    println!("{} {} {} {}", sums[0], sums[1], sums[2], sums[3]);
    Ok(())
}

/// Whether a number's node is an operator of others that we have a kernel for in tract. Most are ours.
fn is_others(number: u64) -> bool {
    number % 4 == 3
}

/// The node of a number, and the bytes that its inputs' numbers are made of.
fn call(number: u64) -> (nodes::Call, Vec<u8>) {
    let mut rng = Rng::new(number);
    let bytes: Vec<u8> = (0..BYTES).map(|_| rng.below(256) as u8).collect();
    let choices = &mut Choices(&bytes);
    let mut call = if is_others(number) { nodes::blocks(choices) } else { nodes::ours(choices) };
    nodes::spoil(&mut call, choices);
    (call, choices.0.to_vec())
}

/// The model of a number, and what its inputs are given.
fn node(number: u64) -> Option<nodes::Written> {
    let (call, rest) = call(number);
    call.model(&mut Choices(&rest))
}

/// The output, where there is one.
fn run(path: &Path, runtime: RuntimeChoice, given: &[(String, Tensor)]) -> Option<Tensor> {
    let options = Options { runtime, threads: Some(2), ..Options::default() };
    let mut model = Model::load(path, &options).ok()?;
    let outputs = model.run(given.iter().map(|(name, tensor)| (name, Value::from(tensor.clone())))).ok()?;
    outputs.first()?.to_tensor().ok()
}

fn compare(number: u64, a: &Tensor, b: &Tensor, numbers_too: bool) -> Result<()> {
    ensure!(a.shape() == b.shape(), "node {number}: onnxruntime gives {:?}, tract {:?}", a.shape(), b.shape());
    let (Some(x), Some(y)) = (a.data().to_f32(), b.data().to_f32()) else { return Ok(()) };
    // onnxruntime's own kernels make other numbers of infinities than ours.
    if !numbers_too {
        return Ok(());
    }
    let largest = x.iter().filter(|x| x.is_finite()).fold(1f32, |most, x| most.max(x.abs()));
    for (i, (x, y)) in x.iter().zip(&y).enumerate() {
        if x.is_finite() != y.is_finite() || (x.is_finite() && (x - y).abs() > TOLERANCE * largest) {
            bail!("node {number}, element {i}: onnxruntime gives {x}, tract {y}");
        }
    }
    Ok(())
}

/// Bytes of memory of this process.
fn resident() -> Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<usize>()? * 1024)
}
