//! Where sequences are in a batch's cache.

use super::{Batch, PATIENCE, Row};
use crate::error::{Error, Result};
use moh_runtime::Value;

/// Tokens that a row has room for at least; rows grow by doubling.
const ROOM: usize = 256;

impl Batch {
    /// Puts a new sequence, whose cache `from` is (1, heads, length, width), into a row of its own.
    pub(super) fn place(&mut self, row: Row, from: &[Value]) -> Result<()> {
        let rows = self.rows.len().max(needed_rows(self.sequences() + 1, self.slots));
        let capacity = self.roomy(row.length + 1, row.most);
        if rows > self.rows.len() || row.length >= self.capacity {
            self.arrange(rows, capacity)?;
        }
        let free = self.rows.iter().position(Option::is_none).unwrap_or(0);
        for (to, from) in self.cache.iter_mut().zip(from) {
            copy_row(from, 0, to, free, row.length)?;
        }
        self.rows[free] = Some(row);
        Ok(())
    }

    /// Makes room for one more token of every sequence, and gives rows back that have not been needed for a while.
    pub(super) fn make_room(&mut self) -> Result<()> {
        let most = self.rows.iter().flatten().map(|row| row.length).max().unwrap_or(0);
        if most >= self.longest {
            let reason = format!("a sequence has {most} tokens, and the longest has {}", self.longest);
            return Err(Error::Request { path: self.model.model.path().to_owned(), reason });
        }
        if !self.model.interface.in_place {
            return Ok(());
        }
        let needed = needed_rows(self.sequences(), self.slots);
        self.spare = if needed < self.rows.len() { self.spare + 1 } else { 0 };
        let rows = if self.spare > PATIENCE { needed } else { self.rows.len() };
        if most >= self.capacity || rows < self.rows.len() {
            self.arrange(rows, self.roomy(most + 1, 0))?;
        }
        Ok(())
    }

    /// Room for `tokens`, and for some more: at most for what any sequence, or another one of at most `most` tokens, will need.
    fn roomy(&self, tokens: usize, most: usize) -> usize {
        if tokens <= self.capacity {
            return self.capacity;
        }
        let most = self.rows.iter().flatten().map(|row| row.most).fold(most, usize::max);
        tokens.saturating_mul(2).max(ROOM).min(most).max(tokens)
    }

    /// Moves the sequences into a new cache of `rows` rows, at least as many as there are sequences.
    fn arrange(&mut self, rows: usize, capacity: usize) -> Result<()> {
        let kept: Vec<(usize, Row)> =
            self.rows.iter().enumerate().filter_map(|(i, row)| row.map(|row| (i, row))).collect();
        let old = std::mem::take(&mut self.cache).into_iter().map(Some).chain(std::iter::repeat_with(|| None));
        // One tensor after the other, so that not all of both caches are in memory.
        for (entry, old) in self.model.interface.cache.iter().zip(old) {
            let mut new = entry.empty(&self.model.model, rows, capacity)?;
            for (i, (from, row)) in kept.iter().enumerate() {
                if let Some(old) = &old {
                    copy_row(old, *from, &mut new, i, row.length)?;
                }
            }
            self.cache.push(new);
        }
        self.rows = kept.into_iter().map(|(_, row)| Some(row)).collect();
        self.rows.resize(rows, None);
        (self.capacity, self.spare) = (capacity, 0);
        Ok(())
    }
}

/// Rows for so many sequences: a power of two, so that not every sequence that joins moves the others.
pub(super) fn needed_rows(sequences: usize, slots: usize) -> usize {
    sequences.next_power_of_two().min(slots.max(sequences))
}

/// Copies the first `length` tokens of a row to a row of another cache: (rows, heads, capacity, width), with the same heads and width.
fn copy_row(from: &Value, from_row: usize, to: &mut Value, to_row: usize, length: usize) -> Result<()> {
    let (&[_, heads, from_capacity, width], &[_, _, to_capacity, _]) = (from.shape(), to.shape()) else {
        let found = format!("{:?} and {:?}", from.shape(), to.shape());
        let expected = "caches of 4 dimensions".to_owned();
        return Err(moh_runtime::Error::ElementType { tensor: "cache".to_owned(), expected, found }.into());
    };
    let data = from.data()?;
    let parts = (0..heads).filter_map(|head| {
        let start = (from_row * heads + head) * from_capacity * width;
        let part = data.range(start..start + length * width)?;
        Some(((to_row * heads + head) * to_capacity * width, part))
    });
    Ok(to.write(&parts.collect::<Vec<_>>())?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use moh_runtime::Tensor;

    #[test]
    fn rows_are_powers_of_two_up_to_the_slots() {
        let rows: Vec<usize> = (1..=12).map(|sequences| needed_rows(sequences, 12)).collect();
        assert_eq!(rows, [1, 2, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12]);
        assert_eq!(needed_rows(3, 3), 3);
    }

    #[test]
    fn a_row_is_copied_head_by_head() {
        let from: Value = Tensor::new([2, 2, 2, 1], (1..=8).map(|x| x as f32).collect::<Vec<f32>>()).unwrap().into();
        let mut to: Value = Tensor::zeros(moh_runtime::ElementType::F32, [2, 2, 3, 1]).unwrap().into();
        copy_row(&from, 1, &mut to, 0, 2).unwrap();
        copy_row(&from, 0, &mut to, 1, 1).unwrap();
        let expected = [5.0, 6.0, 0.0, 7.0, 8.0, 0.0, 1.0, 0.0, 0.0, 3.0, 0.0, 0.0];
        assert_eq!(to.as_slice::<f32>().unwrap(), expected);
    }
}
