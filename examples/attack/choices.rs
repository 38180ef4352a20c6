//! Bytes of the fuzzer as choices; there is always another one, so every input means something.

/// The bytes that are left.
pub struct Choices<'a>(pub &'a [u8]);

impl Choices<'_> {
    /// The next byte; 0 at the end.
    pub fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((&first, rest)) => {
                self.0 = rest;
                first
            }
            None => 0,
        }
    }

    /// One time in `n`.
    pub fn one_in(&mut self, n: u8) -> bool {
        self.byte() % n == n - 1
    }

    /// One of the list.
    pub fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[usize::from(self.byte()) % list.len()]
    }

    /// An integer: most often a small one, else one at an edge of its type, else any.
    pub fn integer(&mut self) -> i64 {
        const EDGES: [i64; 12] = [
            -1,
            i64::MIN,
            i64::MAX,
            1 << 20,
            (1 << 20) + 1,
            1 << 31,
            (1 << 32) - 1,
            1 << 32,
            1 << 61,
            1 << 62,
            -(1 << 31),
            i64::MAX - 31,
        ];
        match self.byte() {
            small @ 0..200 => i64::from(small % 40),
            200..250 => self.of(&EDGES),
            _ => i64::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }

    /// A number: most often an ordinary one, else one that is none or at an edge.
    pub fn float(&mut self) -> f32 {
        const EDGES: [f32; 9] =
            [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-45, -1e30];
        match self.byte() {
            small @ 0..220 => f32::from(small) / 110.0 - 1.0,
            _ => self.of(&EDGES),
        }
    }
}
