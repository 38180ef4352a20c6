//! A validated call, and the addresses of its rows.

use moh_operators::Element;
use moh_operators::routed_attention::Problem;

/// The tensors of a call. Slice lengths have been validated against `problem`.
#[derive(Clone, Copy)]
pub(super) struct Call<'a, I, T> {
    pub(super) isa: I,
    pub(super) problem: &'a Problem,
    /// The group size of `problem`; [`super::plan::Selection`] checks that rows fit u32.
    pub(super) group_size: u32,
    pub(super) query: &'a [T],
    pub(super) key: &'a [T],
    pub(super) value: &'a [T],
    pub(super) gates: &'a [f32],
    pub(super) bias: Option<&'a [T]>,
    /// What each sequence's queries see.
    pub(super) spans: &'a [Span],
    pub(super) output: Output<T>,
}

/// The keys that a sequence's queries see, which are neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    /// The first one. Positions of keys are counted from here.
    first: usize,
    /// How many of them query 0 sees, less one; each query sees one more than the query before it.
    ahead: isize,
    /// As far as there are keys.
    keys: usize,
}

impl Span {
    /// All keys, or those of a causal mask.
    pub(super) fn of(p: &Problem) -> Span {
        let (keys, q_len) = (p.kv_len as isize, p.q_len as isize);
        Span { first: 0, ahead: if p.is_causal { keys - q_len } else { keys }, keys: p.kv_len }
    }

    /// Of a cache of `capacity` tokens, whose tokens begin at `first`; query 0 is token `start`.
    pub(crate) fn in_cache(capacity: usize, first: i64, start: i64) -> Span {
        let begin = usize::try_from(first).unwrap_or(0).min(capacity);
        // As a capacity, positions fit isize; others are far outside.
        let start = start.clamp(-(1 << 60), 1 << 60) as isize;
        Span { first: begin, ahead: start - begin as isize, keys: capacity - begin }
    }

    /// How many keys query `i` sees.
    fn visible(&self, i: usize) -> usize {
        usize::try_from(self.ahead + 1 + i as isize).unwrap_or(0).min(self.keys)
    }
}

/// The output, to which workers write disjoint parts.
#[derive(Clone, Copy)]
pub(super) struct Output<T>(pub(super) *mut T);

// SAFETY: every (token, head) block belongs to one work item, and every item to one worker.
unsafe impl<T: Send> Send for Output<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Output<T> {}

/// A (batch, KV head) pair. Its rows are numbered `token * group_size + head within the group`.
#[derive(Clone, Copy)]
pub(super) struct Head {
    pub(super) batch: usize,
    pub(super) kv_head: usize,
}

impl<I, T: Element> Call<'_, I, T> {
    /// The (batch, KV head) pair with this index.
    pub(super) fn head(&self, index: usize) -> Head {
        Head { batch: index / self.problem.kv_num_heads, kv_head: index % self.problem.kv_num_heads }
    }

    /// A row's token and its head within the group.
    fn split(&self, row: u32) -> (usize, usize) {
        match self.group_size {
            // Skips a slow division; most models have group size 1.
            1 => (row as usize, 0),
            group => ((row / group) as usize, (row % group) as usize),
        }
    }

    /// Index of the (token, head) pair in the whole call.
    fn block(&self, head: Head, row: u32) -> usize {
        let p = self.problem;
        let (token, member) = self.split(row);
        (head.batch * p.q_len + token) * p.num_heads + head.kv_head * self.group_size as usize + member
    }

    /// Pointer to a row's query: `head_dim` elements.
    pub(super) fn query(&self, head: Head, row: u32) -> *const T {
        let d = self.problem.head_dim;
        let block = self.block(head, row);
        self.query[block * d..(block + 1) * d].as_ptr()
    }

    /// A row's gate.
    pub(super) fn gate(&self, head: Head, row: u32) -> f32 {
        self.gates[self.block(head, row)]
    }

    /// Pointer to a row's output: `value_dim` elements.
    pub(super) fn output(&self, head: Head, row: u32) -> *mut T {
        // SAFETY: the output holds value_dim elements for every (token, head) pair.
        unsafe { self.output.0.add(self.block(head, row) * self.problem.value_dim) }
    }

    /// Writes 0 to the outputs of `rows`.
    pub(super) fn clear(&self, head: Head, rows: std::ops::Range<u32>) {
        for row in rows {
            let output = self.output(head, row);
            for d in 0..self.problem.value_dim {
                // SAFETY: the block has value_dim elements and belongs to this work item.
                unsafe { output.add(d).write(T::from_f32(0.0)) }
            }
        }
    }

    /// The number of keys that a row sees.
    pub(super) fn visible(&self, head: Head, row: u32) -> usize {
        self.spans[head.batch].visible(self.split(row).0)
    }

    /// The number of keys that any query of a sequence sees.
    pub(super) fn length(&self, batch: usize) -> usize {
        self.spans[batch].visible(self.problem.q_len.saturating_sub(1))
    }

    /// Pointer to the keys from `token` of the head's span on, and their stride.
    pub(super) fn keys(&self, head: Head, token: usize) -> (*const T, usize) {
        let (p, dim) = (self.problem, self.problem.head_dim);
        let token = self.spans[head.batch].first + token;
        (self.key[p.kv_offset(head.batch, head.kv_head, token, dim)..].as_ptr(), p.kv_stride(dim))
    }

    /// Pointer to the values from `token` of the head's span on, and their stride.
    pub(super) fn values(&self, head: Head, token: usize) -> (*const T, usize) {
        let (p, dim) = (self.problem, self.problem.value_dim);
        let token = self.spans[head.batch].first + token;
        (self.value[p.kv_offset(head.batch, head.kv_head, token, dim)..].as_ptr(), p.kv_stride(dim))
    }

    /// A row's bias from key `key` on, and its stride: 0 or 1.
    pub(super) fn bias(&self, head: Head, row: u32, key: usize) -> Option<(&[T], usize)> {
        let p = self.problem;
        let ([batch, of_head, query, of_key], bias) = (p.bias_strides?, self.bias?);
        let (token, member) = self.split(row);
        let h = head.kv_head * self.group_size as usize + member;
        Some((&bias[head.batch * batch + h * of_head + token * query + key * of_key..], of_key))
    }
}
