//! Measured times of published models, for `inspect` and README.

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

pub(crate) fn ms(milliseconds: f64) -> String {
    if milliseconds < 100.0 { format!("{milliseconds:.1} ms") } else { format!("{milliseconds:.0} ms") }
}
