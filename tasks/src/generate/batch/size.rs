//! What a batch's cache takes.

/// Bytes of a [`Batch`](super::Batch)'s cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheSize {
    /// Of a token of one sequence, over all tensors.
    pub token: usize,
    /// Tensors of the cache.
    pub tensors: usize,
    /// Whether rows share a cache that grows by being copied, one tensor after the other.
    pub in_place: bool,
}

impl CacheSize {
    /// The most while there are `rows` rows with room for `room` tokens each, and a prompt of `prompt` tokens is being read.
    pub fn bytes(self, rows: usize, room: usize, prompt: usize) -> usize {
        let cache = self.token.saturating_mul(rows).saturating_mul(room);
        if !self.in_place {
            // The one that goes in, and the one that comes out.
            return cache.saturating_mul(2);
        }
        // While it grows, one of the tensors is there twice.
        let twice = cache / self.tensors.max(1);
        cache.saturating_add(twice).saturating_add(self.token.saturating_mul(prompt))
    }

    /// The most tokens that each of `rows` sequences can have for which [`CacheSize::bytes`] is at most `bytes`, also where all of one is prompt.
    pub fn longest(self, bytes: usize, rows: usize) -> usize {
        let (mut fits, mut beyond) = (0, bytes / self.token.max(1) + 1);
        while beyond - fits > 1 {
            let middle = fits + (beyond - fits) / 2;
            if self.bytes(rows, middle, middle) <= bytes {
                fits = middle;
            } else {
                beyond = middle;
            }
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_their_copies_and_a_prompt_are_counted() {
        let in_place = CacheSize { token: 10, tensors: 2, in_place: true };
        // Two rows of five tokens, one of the two tensors once more while it grows, and a prompt of three tokens.
        assert_eq!(in_place.bytes(2, 5, 3), 100 + 50 + 30);
        assert_eq!(CacheSize { in_place: false, ..in_place }.bytes(2, 5, 3), 200);
    }

    #[test]
    fn the_longest_sequence_is_the_last_that_fits() {
        for in_place in [true, false] {
            let size = CacheSize { token: 640, tensors: 32, in_place };
            for bytes in [0, 1, 1000, 5000, 1_000_000] {
                for rows in [1, 16] {
                    let longest = size.longest(bytes, rows);
                    assert!(size.bytes(rows, longest, longest) <= bytes, "{bytes} {rows}");
                    assert!(size.bytes(rows, longest + 1, longest + 1) > bytes, "{bytes} {rows}");
                }
            }
        }
        assert_eq!(CacheSize { token: 0, tensors: 0, in_place: true }.longest(9, 1), 9);
    }
}
