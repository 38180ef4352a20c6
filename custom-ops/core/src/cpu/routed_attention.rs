//! RoutedAttention on a CPU.

use super::Work;
use crate::error::Error;
use crate::host::Host;
use crate::schema::Attributes;
use crate::tensor::{DataMut, Tensor};

pub(super) fn run(_: &Attributes, _: &[Option<Tensor<'_>>], _: DataMut<'_>, _: &dyn Host) -> Result<Work, Error> {
    Ok(Work::default())
}
