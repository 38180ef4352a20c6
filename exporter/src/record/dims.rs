//! Symbolic dimensions of recorded values: what a reader of the graph, and the outputs' declarations, need.

use crate::graph::Dim;

/// The dimension that two broadcast dimensions give.
fn merge(a: &Dim, b: &Dim) -> Dim {
    match (a, b) {
        (Dim::Fixed(1), d) | (d, Dim::Fixed(1)) => d.clone(),
        (Dim::Unknown, d) | (d, _) => d.clone(),
    }
}

/// ONNX broadcasting.
pub(super) fn broadcast(a: &[Dim], b: &[Dim]) -> Vec<Dim> {
    let rank = a.len().max(b.len());
    let dim = |x: &[Dim], i: usize| (i + x.len()).checked_sub(rank).map_or(Dim::Fixed(1), |i| x[i].clone());
    (0..rank).map(|i| merge(&dim(a, i), &dim(b, i))).collect()
}

/// The sum of the parts' sizes along the axis of a concatenation.
pub(super) fn sum<'a>(parts: impl Iterator<Item = &'a Dim>) -> Dim {
    let (mut fixed, mut names) = (0, Vec::new());
    for part in parts {
        match part {
            Dim::Fixed(n) => fixed += n,
            Dim::Named(name) => names.push(name.clone()),
            Dim::Unknown => return Dim::Unknown,
        }
    }
    match (names.is_empty(), fixed) {
        (true, n) => Dim::Fixed(n),
        (false, 0) => Dim::Named(names.join("+")),
        (false, n) => Dim::Named(format!("{}+{n}", names.join("+"))),
    }
}

/// ONNX Reshape: 0 copies; -1 is what remains, known where the symbols on both sides are the same.
pub(super) fn reshape(dims: &[Dim], shape: &[i64]) -> Vec<Dim> {
    let mut target: Vec<Dim> = shape
        .iter()
        .enumerate()
        .map(|(i, &d)| match d {
            0 => dims.get(i).cloned().unwrap_or(Dim::Unknown),
            -1 => Dim::Unknown,
            d => Dim::Fixed(d as usize),
        })
        .collect();
    let Some(rest) = shape.iter().position(|&d| d == -1) else { return target };
    let mut symbols: Vec<&Dim> = dims.iter().filter(|d| !matches!(d, Dim::Fixed(_))).collect();
    let mut cancelled = true;
    for (i, dim) in target.iter().enumerate().filter(|&(i, d)| i != rest && !matches!(d, Dim::Fixed(_))) {
        match symbols.iter().position(|s| *s == dim && **s != Dim::Unknown) {
            Some(at) => drop(symbols.remove(at)),
            None => cancelled = cancelled && i == rest,
        }
    }
    let fixed = |dims: &[Dim]| dims.iter().map(|d| if let Dim::Fixed(n) = d { *n } else { 1 }).product::<usize>();
    let divisor = fixed(&target);
    if cancelled && divisor > 0 && fixed(dims).is_multiple_of(divisor) {
        target[rest] = match (symbols.as_slice(), fixed(dims) / divisor) {
            ([], n) => Dim::Fixed(n),
            ([one], 1) => (*one).clone(),
            _ => Dim::Unknown,
        };
    }
    target
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Dim {
        Dim::Named(name.to_owned())
    }

    #[test]
    fn reshape_resolves_the_rest_where_symbols_cancel() {
        let x = [named("batch"), named("sequence"), Dim::Fixed(4), Dim::Fixed(8)];
        assert_eq!(reshape(&x, &[0, 0, -1]), [named("batch"), named("sequence"), Dim::Fixed(32)]);
        assert_eq!(reshape(&x, &[0, -1, 32]), [named("batch"), named("sequence"), Dim::Fixed(32)]);
        assert_eq!(reshape(&x, &[-1, 32]), [Dim::Unknown, Dim::Fixed(32)]);
        assert_eq!(reshape(&[named("batch")], &[-1, 1]), [named("batch"), Dim::Fixed(1)]);
    }

    #[test]
    fn sums_and_broadcasts_keep_symbols() {
        assert_eq!(sum([named("past"), named("sequence")].iter()), named("past+sequence"));
        assert_eq!(sum([Dim::Fixed(2), Dim::Fixed(3)].iter()), Dim::Fixed(5));
        let b = broadcast(&[named("batch"), Dim::Fixed(1), Dim::Fixed(6)], &[Dim::Fixed(5), Dim::Fixed(1)]);
        assert_eq!(b, [named("batch"), Dim::Fixed(5), Dim::Fixed(6)]);
    }
}
