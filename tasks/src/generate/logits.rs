//! What a sequence's next token is chosen from.

use moh_runtime::{Data, Result, Tensor, Value};
use std::borrow::Cow;
use std::ops::Range;

/// The logits of a sequence's next token, one a token of the vocabulary, where the runtime has left them.
#[derive(Debug, Clone)]
pub struct Logits {
    value: Value,
    range: Range<usize>,
}

impl Logits {
    /// Those of the vocabulary at `range` of `value`; `None` where there are no such numbers.
    pub(super) fn new(value: &Value, range: Range<usize>) -> Result<Option<Logits>> {
        let is_float = |data: Data<'_>| matches!(data, Data::F32(_) | Data::F16(_) | Data::BF16(_) | Data::F64(_));
        let found = value.data()?.range(range.clone()).is_some_and(is_float);
        Ok(found.then(|| Logits { value: value.clone(), range }))
    }

    /// In the order of the tokens, as float32.
    pub fn get(&self) -> Cow<'_, [f32]> {
        let data = self.value.data().ok();
        match data {
            Some(Data::F32(all)) => all.get(self.range.clone()).unwrap_or_default().into(),
            Some(data) => data.range(self.range.clone()).and_then(|row| row.to_f32()).unwrap_or_default().into(),
            // Looked at in `new`.
            None => Cow::default(),
        }
    }
}

impl TryFrom<Vec<f32>> for Logits {
    type Error = moh_runtime::Error;

    fn try_from(logits: Vec<f32>) -> Result<Logits> {
        let range = 0..logits.len();
        Ok(Logits { value: Tensor::new([logits.len()], logits)?.into(), range })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_row_is_read_where_it_is() {
        let value: Value = Tensor::new([2, 3], vec![1f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap().into();
        let row = Logits::new(&value, 3..6).unwrap().unwrap();
        assert_eq!(*row.get(), [4.0, 5.0, 6.0]);
        assert!(matches!(row.get(), Cow::Borrowed(_)));
        assert!(Logits::new(&value, 4..7).unwrap().is_none());
        let integers: Value = Tensor::new([1], vec![1i64]).unwrap().into();
        assert!(Logits::new(&integers, 0..1).unwrap().is_none());
    }
}
