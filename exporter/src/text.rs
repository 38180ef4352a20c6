//! Numbers, sizes, types and paths as people and JSON read them.

use crate::graph::ElementType;
use serde::Serializer;
use std::path::Path;

/// An element type by its name.
pub(crate) fn shown<S: Serializer>(what: &ElementType, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(what)
}

/// A path as JSON, which holds no other text than Unicode.
pub(crate) fn path<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&path.display())
}

/// A number with a unit prefix: 1.23 M.
pub(crate) fn short(n: f64) -> String {
    let (scale, unit) = match n {
        n if n >= 1e12 => (1e12, " T"),
        n if n >= 1e9 => (1e9, " G"),
        n if n >= 1e6 => (1e6, " M"),
        n if n >= 1e3 => (1e3, " k"),
        _ => (1.0, ""),
    };
    if unit.is_empty() { format!("{n}") } else { format!("{:.2}{unit}", n / scale) }
}

/// A size in bytes with a unit prefix.
pub(crate) fn bytes(n: u64) -> String {
    let text = short(n as f64);
    if text.contains(' ') { format!("{text}B") } else { format!("{text} B") }
}

/// Equal neighbours as one: `8 x 4, 6 x 2`.
pub(crate) fn runs(counts: &[usize]) -> String {
    let mut groups: Vec<(usize, usize)> = Vec::new();
    for &count in counts {
        match groups.last_mut() {
            Some((value, times)) if *value == count => *times += 1,
            _ => groups.push((count, 1)),
        }
    }
    let text: Vec<String> =
        groups.iter().map(|(v, n)| if *n == 1 { v.to_string() } else { format!("{v} (x{n})") }).collect();
    text.join(", ")
}
