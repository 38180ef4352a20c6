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
    pub(super) output: Output<T>,
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
    pub(super) fn visible(&self, row: u32) -> usize {
        self.problem.visible_keys(self.split(row).0)
    }

    /// Pointer to the keys from `token` on, and their stride.
    pub(super) fn keys(&self, head: Head, token: usize) -> (*const T, usize) {
        let (p, dim) = (self.problem, self.problem.head_dim);
        (self.key[p.kv_offset(head.batch, head.kv_head, token, dim)..].as_ptr(), p.kv_stride(dim))
    }

    /// Pointer to the values from `token` on, and their stride.
    pub(super) fn values(&self, head: Head, token: usize) -> (*const T, usize) {
        let (p, dim) = (self.problem, self.problem.value_dim);
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
