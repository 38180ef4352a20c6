//! Batches of prompts, and how they grow token by token.

use crate::error::{Error, Result};
use moh_runtime::Tensor;

/// The position that padding is given: what it computes is masked, but it must lie in the model's range.
const PADDING_POSITION: i64 = 1;

/// Prompts of one length: shorter ones are padded on the left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompts {
    batch: usize,
    length: usize,
    ids: Vec<i64>,
    mask: Vec<i64>,
}

impl Prompts {
    /// Prompts that are padded already: `input_ids` and `attention_mask` (0 = padding) of shape (batch, length), row-major.
    ///
    /// # Errors
    /// [`Error::Prompt`] where there is no prompt, the sizes differ, or a mask is not zeros followed by at least a one.
    pub fn padded(batch: usize, input_ids: Vec<i64>, attention_mask: Vec<i64>) -> Result<Prompts> {
        let bad = |reason: String| Err(Error::Prompt(reason));
        if batch == 0 || input_ids.is_empty() || !input_ids.len().is_multiple_of(batch) {
            return bad(format!("{} tokens do not make a batch of {batch}", input_ids.len()));
        }
        if attention_mask.len() != input_ids.len() {
            return bad(format!("{} tokens, but an attention mask of {}", input_ids.len(), attention_mask.len()));
        }
        let length = input_ids.len() / batch;
        for (row, mask) in attention_mask.chunks(length).enumerate() {
            let padding = mask.iter().take_while(|&&m| m == 0).count();
            if padding == length || mask[padding..].iter().any(|&m| m != 1) {
                return bad(format!("row {row}: expected an attention mask of zeros, then ones (padding on the left)"));
            }
        }
        Ok(Prompts { batch, length, ids: input_ids, mask: attention_mask })
    }

    /// Pads `prompts` on the left with `pad` to the longest one's length.
    ///
    /// # Errors
    /// [`Error::Prompt`] where there is none, or one is empty.
    pub fn new(prompts: &[Vec<i64>], pad: i64) -> Result<Prompts> {
        let length = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let (mut ids, mut mask) = (Vec::new(), Vec::new());
        for prompt in prompts {
            if prompt.is_empty() {
                return Err(Error::Prompt("it has no tokens".to_owned()));
            }
            let padding = length - prompt.len();
            ids.extend(std::iter::repeat_n(pad, padding).chain(prompt.iter().copied()));
            mask.extend(std::iter::repeat_n(0, padding).chain(prompt.iter().map(|_| 1)));
        }
        Prompts::padded(prompts.len(), ids, mask)
    }

    /// Number of prompts.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens of a prompt, padding included.
    pub fn length(&self) -> usize {
        self.length
    }
}

/// The sequences of a batch as the next run of the model sees them. Prompts are read in parts.
#[derive(Debug)]
pub(super) struct Sequences<'a> {
    prompts: &'a Prompts,
    /// Tokens of a prompt, padding included, that were read.
    read: usize,
    /// New tokens of every sequence: (batch, length).
    ids: Vec<i64>,
    positions: Vec<i64>,
    /// Old and new tokens' masks, a row a sequence.
    masks: Vec<Vec<i64>>,
}

impl<'a> Sequences<'a> {
    /// The first part of the prompts: `part` tokens over all of them, or one of each.
    pub(super) fn start(prompts: &'a Prompts, part: usize) -> Sequences<'a> {
        let masks = vec![Vec::new(); prompts.batch];
        let mut sequences = Sequences { prompts, read: 0, ids: Vec::new(), positions: Vec::new(), masks };
        sequences.read_on(part);
        sequences
    }

    /// Goes on to the next part of the prompts, whose tokens alone are new then; false where there is none.
    pub(super) fn read_on(&mut self, part: usize) -> bool {
        let length = self.prompts.length;
        let columns = self.read..length.min(self.read.saturating_add(part.div_ceil(self.prompts.batch)));
        if columns.is_empty() {
            return false;
        }
        self.read = columns.end;
        (self.ids, self.positions) = (Vec::new(), Vec::new());
        let rows = self.prompts.ids.chunks(length).zip(self.prompts.mask.chunks(length));
        for ((ids, mask), known) in rows.zip(&mut self.masks) {
            let mut seen: i64 = known.iter().sum();
            for &mask in &mask[columns.clone()] {
                self.positions.push(if mask == 0 { PADDING_POSITION } else { seen });
                seen += mask;
            }
            self.ids.extend(&ids[columns.clone()]);
            known.extend(&mask[columns.clone()]);
        }
        true
    }

    /// Appends a token to every sequence; only these are new then.
    pub(super) fn advance(&mut self, next: Vec<i64>) {
        self.positions = self.masks.iter().map(|mask| mask.iter().sum()).collect();
        self.masks.iter_mut().for_each(|mask| mask.push(1));
        self.ids = next;
    }

    pub(super) fn batch(&self) -> usize {
        self.prompts.batch
    }

    /// New tokens of a sequence.
    pub(super) fn length(&self) -> usize {
        self.ids.len() / self.batch()
    }

    pub(super) fn input_ids(&self) -> Result<Tensor> {
        Ok(Tensor::new([self.batch(), self.length()], self.ids.clone())?)
    }

    /// Old and new tokens of a sequence.
    pub(super) fn total(&self) -> usize {
        self.masks.first().map_or(0, Vec::len)
    }

    /// The mask of old and new tokens; as wide as `capacity` if that is given, where there are no tokens yet.
    pub(super) fn attention_mask(&self, capacity: Option<usize>) -> Result<Tensor> {
        let width = capacity.unwrap_or(0).max(self.total());
        let row = |mask: &Vec<i64>| mask.iter().copied().chain(std::iter::repeat(0)).take(width).collect::<Vec<i64>>();
        Ok(Tensor::new([self.batch(), width], self.masks.iter().flat_map(row).collect::<Vec<i64>>())?)
    }

    pub(super) fn position_ids(&self) -> Result<Tensor> {
        Ok(Tensor::new([self.batch(), self.length()], self.positions.clone())?)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn shorter_prompts_are_padded_on_the_left() {
        let prompts = Prompts::new(&[vec![5, 6, 7], vec![8]], 0).unwrap();
        assert_eq!((prompts.batch(), prompts.length()), (2, 3));
        assert_eq!(prompts, Prompts::padded(2, vec![5, 6, 7, 0, 0, 8], vec![1, 1, 1, 0, 0, 1]).unwrap());
    }

    #[test]
    fn positions_count_real_tokens_only() {
        let prompts = Prompts::new(&[vec![5, 6, 7], vec![8]], 0).unwrap();
        let mut sequences = Sequences::start(&prompts, usize::MAX);
        assert_eq!(sequences.position_ids().unwrap(), Tensor::new([2, 3], vec![0i64, 1, 2, 1, 1, 0]).unwrap());
        sequences.advance(vec![9, 10]);
        assert_eq!(sequences.input_ids().unwrap(), Tensor::new([2, 1], vec![9i64, 10]).unwrap());
        assert_eq!(sequences.position_ids().unwrap(), Tensor::new([2, 1], vec![3i64, 1]).unwrap());
        let mask = vec![1i64, 1, 1, 1, 0, 0, 1, 1];
        assert_eq!(sequences.attention_mask(None).unwrap(), Tensor::new([2, 4], mask).unwrap());
    }

    #[test]
    fn prompts_are_read_in_parts() {
        let prompts = Prompts::new(&[vec![5, 6, 7], vec![8]], 0).unwrap();
        let mut sequences = Sequences::start(&prompts, 3);
        assert_eq!(sequences.input_ids().unwrap(), Tensor::new([2, 2], vec![5i64, 6, 0, 0]).unwrap());
        assert!(sequences.read_on(3));
        assert_eq!(sequences.input_ids().unwrap(), Tensor::new([2, 1], vec![7i64, 8]).unwrap());
        assert_eq!(sequences.position_ids().unwrap(), Tensor::new([2, 1], vec![2i64, 0]).unwrap());
        let mask = Tensor::new([2, 3], vec![1i64, 1, 1, 0, 0, 1]).unwrap();
        assert_eq!(sequences.attention_mask(None).unwrap(), mask);
        assert!(!sequences.read_on(3));
        assert_eq!(sequences.length(), 1, "as it was");
        assert_eq!(Sequences::start(&prompts, 1).length(), 1, "one of each");
    }

    #[test]
    fn bad_batches_are_refused() {
        assert!(Prompts::new(&[], 0).is_err());
        assert!(Prompts::new(&[vec![1], vec![]], 0).is_err());
        assert!(Prompts::padded(2, vec![1, 2, 3], vec![1, 1, 1]).is_err());
        assert!(Prompts::padded(1, vec![1, 2], vec![1]).is_err());
        assert!(Prompts::padded(1, vec![1, 2], vec![1, 0]).is_err(), "padding on the right");
        assert!(Prompts::padded(1, vec![1, 2], vec![0, 0]).is_err(), "nothing but padding");
        assert!(Prompts::padded(1, vec![1, 2], vec![0, 2]).is_err(), "not a mask");
    }
}
