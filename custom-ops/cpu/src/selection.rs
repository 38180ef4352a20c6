//! The tokens that use each head (or expert).

use moh_operators::Error;
use std::ops::Range;

/// The lists of tokens that use each head, per chunk of consecutive tokens.
pub(crate) struct Selection {
    heads: usize,
    /// Start of the list of each (chunk, head), and the end of the last list.
    starts: Vec<usize>,
    tokens: Vec<u32>,
}

/// Neighbouring heads with equal lists of tokens.
pub(crate) struct Run<'a> {
    pub(crate) heads: Range<usize>,
    /// Token indices within the chunk, ascending.
    pub(crate) tokens: &'a [u32],
}

impl Selection {
    /// Reads `gates` (tokens, heads). A chunk has fewer than 2^32 tokens.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn new(gates: &[f32], heads: usize, chunk: usize) -> Result<Selection, Error> {
        let chunk = chunk.saturating_mul(heads).max(1);
        let mut starts = zeros::<usize>((gates.len().div_ceil(chunk)).saturating_mul(heads).saturating_add(1))?;
        // One element more than the maximum: each token is written unconditionally, and the end advances if it is
        // selected (no mispredicted branch).
        let mut tokens = zeros::<u32>(gates.len() + 1)?;
        let (mut count, mut list) = (0, 0);
        for gates in gates.chunks(chunk) {
            for head in 0..heads {
                for (token, gate) in gates[head..].iter().step_by(heads).enumerate() {
                    tokens[count] = token as u32;
                    count += usize::from(*gate != 0.0);
                }
                list += 1;
                starts[list] = count;
            }
        }
        Ok(Selection { heads, starts, tokens })
    }

    /// The tokens of a chunk that use a head, as ascending indices within the chunk.
    pub(crate) fn tokens(&self, chunk: usize, head: usize) -> &[u32] {
        &self.tokens[self.start(chunk, head)..self.start(chunk, head + 1)]
    }

    /// The number of (token, head) pairs in all earlier lists.
    pub(crate) fn start(&self, chunk: usize, head: usize) -> usize {
        self.starts[chunk * self.heads + head]
    }

    /// The heads among `heads` that any token of the chunk uses, ascending. Neighbours with equal lists form one run.
    pub(crate) fn runs(&self, chunk: usize, heads: Range<usize>) -> impl Iterator<Item = Run<'_>> {
        let mut next = heads.start;
        std::iter::from_fn(move || {
            while next < heads.end {
                let first = next;
                let tokens = self.tokens(chunk, first);
                next += 1;
                if tokens.is_empty() {
                    continue;
                }
                while next < heads.end && self.tokens(chunk, next) == tokens {
                    next += 1;
                }
                return Some(Run { heads: first..next, tokens });
            }
            None
        })
    }
}

fn zeros<N: Copy + Default>(len: usize) -> Result<Vec<N>, Error> {
    let mut numbers = Vec::new();
    numbers.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { bytes: len.saturating_mul(size_of::<N>()) })?;
    numbers.resize(len, N::default());
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::Selection;

    #[test]
    fn lists_match_the_gates_and_runs_join_equal_lists() {
        // Three tokens, five heads, in chunks of two.
        let gates = [
            [1.0, -1.0, 0.0, 0.5, 2.0], //
            [1.0, 3.0, -0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, f32::NAN, f32::INFINITY],
        ];
        let selection = Selection::new(gates.as_flattened(), 5, 2).unwrap();
        let lists: Vec<&[u32]> = (0..5).map(|head| selection.tokens(0, head)).collect();
        assert_eq!(lists, [&[0, 1][..], &[0, 1], &[], &[0], &[0]]);
        assert_eq!([selection.start(0, 3), selection.start(1, 0)], [4, 6]);
        let runs =
            |chunk, heads| selection.runs(chunk, heads).map(|run| (run.heads, run.tokens.to_vec())).collect::<Vec<_>>();
        assert_eq!(runs(0, 0..5), [(0..2, vec![0, 1]), (3..5, vec![0])]);
        assert_eq!(runs(0, 1..4), [(1..2, vec![0, 1]), (3..4, vec![0])]);
        assert_eq!(runs(1, 0..5), [(3..5, vec![0])]);
        assert!(runs(1, 2..3).is_empty());
    }
}
