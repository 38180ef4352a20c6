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

/// A dimension as a number times a symbol, which is written `4*sequence`.
fn factors(dim: &Dim) -> (usize, Option<Dim>) {
    match dim {
        Dim::Fixed(n) => (*n, None),
        Dim::Named(name) => match name.split_once('*').and_then(|(n, symbol)| Some((n.parse().ok()?, symbol))) {
            Some((n, symbol)) => (n, Some(Dim::Named(symbol.to_owned()))),
            None => (1, Some(dim.clone())),
        },
        Dim::Unknown => (1, Some(Dim::Unknown)),
    }
}

/// ONNX Reshape: 0 copies; -1 is what remains, known where it is a number, or a multiple of one symbol.
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
    let (of_input, mut symbols): (Vec<usize>, Vec<Option<Dim>>) = dims.iter().map(factors).unzip();
    let others: Vec<_> = target.iter().enumerate().filter(|&(i, _)| i != rest).map(|(_, dim)| factors(dim)).collect();
    let mut divisor = 1;
    for (n, symbol) in others {
        divisor *= n;
        let Some(symbol) = symbol else { continue };
        match symbols.iter().position(|s| s.as_ref() == Some(&symbol) && symbol != Dim::Unknown) {
            Some(at) => symbols[at] = None,
            None => return target,
        }
    }
    let dividend: usize = of_input.iter().product();
    if divisor > 0 && dividend.is_multiple_of(divisor) {
        let symbols: Vec<Dim> = symbols.into_iter().flatten().collect();
        target[rest] = match (symbols.as_slice(), dividend / divisor) {
            ([], n) => Dim::Fixed(n),
            ([one], 1) => one.clone(),
            ([Dim::Named(name)], n) if n > 0 && !name.contains('+') => Dim::Named(format!("{n}*{name}")),
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
        // And back again.
        let flat = reshape(&x, &[0, -1, 8]);
        assert_eq!(flat, [named("batch"), named("4*sequence"), Dim::Fixed(8)]);
        assert_eq!(reshape(&flat, &[0, -1, 4, 8]), x);
        assert_eq!(reshape(&flat, &[0, -1, 5]), [named("batch"), Dim::Unknown, Dim::Fixed(5)]);
    }

    #[test]
    fn sums_and_broadcasts_keep_symbols() {
        assert_eq!(sum([named("past"), named("sequence")].iter()), named("past+sequence"));
        assert_eq!(sum([Dim::Fixed(2), Dim::Fixed(3)].iter()), Dim::Fixed(5));
        let b = broadcast(&[named("batch"), Dim::Fixed(1), Dim::Fixed(6)], &[Dim::Fixed(5), Dim::Fixed(1)]);
        assert_eq!(b, [named("batch"), Dim::Fixed(5), Dim::Fixed(6)]);
    }
}
