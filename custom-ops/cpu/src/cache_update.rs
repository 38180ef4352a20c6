//! CacheUpdate on a CPU: copies, or only the new tokens where the cache is the output's own memory.

use crate::isa::Isa;
use crate::kernel::{Call, CpuOperator, Work};
use crate::workers::{Shared, share};
use moh_operators::cache_update::{Inputs, Problem};
use moh_operators::{CacheUpdate, Element, Error};

/// Elements that one thread copies sooner than others could begin.
const ALONE: usize = 16 << 10;

impl CpuOperator for CacheUpdate {
    type Output<T: Element> = T;

    fn run<I: Isa, T: Element>(call: Call<'_, Self, I, T>) -> Result<Work, Error> {
        let Call { problem: p, inputs, output, host, .. } = call;
        let Inputs { past, update, start, .. } = inputs;
        // A cache of the output's shape without elements is the output.
        let past = (p.capacity < p.length || !past.is_empty()).then_some(past);
        let written = if past.is_some() { output.len() } else { update.len() };
        let (heads, size) = (p.batch * p.kv_num_heads, p.length * p.dim);
        let output = Shared(output.as_mut_ptr());
        let head = |index: usize| {
            // SAFETY: the output has `size` elements for each head of each sequence; each is one item.
            let present = unsafe { output.slice(index * size, size) };
            write(p, index, p.position(start[index / p.kv_num_heads]), past, update, present);
        };
        match written <= ALONE {
            true => (0..heads).for_each(head),
            false => {
                let work = |_: &mut (), index| {
                    head(index);
                    0
                };
                share(host, heads, || Ok(()), work)?;
            }
        }
        Ok(Work::default())
    }
}

/// Writes the cache of one head of one sequence; only the new tokens without `past`.
fn write<T: Element>(p: &Problem, index: usize, start: usize, past: Option<&[T]>, update: &[T], present: &mut [T]) {
    let (dim, end) = (p.dim, start + p.q_len);
    if let Some(past) = past {
        let past = &past[index * p.capacity * dim..(index + 1) * p.capacity * dim];
        let before = start.min(p.capacity) * dim;
        present[..before].copy_from_slice(&past[..before]);
        present[before..start * dim].fill(T::from_f32(0.0));
        let after = end.max(p.capacity) * dim;
        present[end * dim..after].copy_from_slice(&past[(end * dim).min(past.len())..]);
        present[after..].fill(T::from_f32(0.0));
    }
    let (batch, head) = (index / p.kv_num_heads, index % p.kv_num_heads);
    for (i, token) in present[start * dim..end * dim].chunks_exact_mut(dim.max(1)).enumerate() {
        let from = ((batch * p.q_len + i) * p.kv_num_heads + head) * dim;
        token.copy_from_slice(&update[from..from + dim]);
    }
}
