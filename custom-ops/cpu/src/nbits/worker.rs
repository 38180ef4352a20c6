//! A worker's products.

use super::activations::{Activations, Used};
use super::{Level, NBits, Row, panel, stream};
use crate::host::Host;
use crate::memory::Memory;
use moh_operators::{Element, Error};
use std::ops::Range;

/// A worker's working memory.
pub(crate) struct Worker<'h> {
    panel: Memory<'h>,
}

impl<'h> Worker<'h> {
    /// Working memory for products with `x`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn new(x: &Activations<'_>, host: &'h dyn Host) -> Result<Worker<'h>, Error> {
        Ok(Worker { panel: panel::sections(x)?.allocate(host)? })
    }

    /// Adds the products of `rows`, which are ascending, with columns of `weight` to the rows' sums. Returns the number of
    /// multiply-accumulate operations.
    ///
    /// # Safety
    /// The sums are valid for reading and writing as many floats as there are columns, and do not overlap. `x` was made for the
    /// weight's format and has the rows.
    pub(crate) unsafe fn multiply<T: Element>(
        &mut self,
        weight: &NBits<'_, T>,
        x: &Activations<'_>,
        rows: &[Row],
        columns: Range<usize>,
    ) -> u64 {
        assert!(weight.format == x.format, "{:?} multiplied by activations for {:?}", weight.format, x.format);
        assert!(columns.end <= weight.n, "columns {columns:?} of {}", weight.n);
        if rows.is_empty() || columns.is_empty() {
            return 0;
        }
        match (&x.used, x.level) {
            (Used::Ranges(ranges), _) => x.engine.run(stream::Stream { weight, x, rows, columns, ranges }),
            (Used::Segments(segments), Level::Int8) => x.engine.run(panel::Bytes {
                weight,
                x,
                rows,
                columns,
                segments: segments.as_deref(),
                panel: &self.panel,
            }),
            (Used::Segments(segments), Level::Float) => x.engine.run(panel::Floats {
                weight,
                x,
                rows,
                columns,
                segments: segments.as_deref(),
                panel: &self.panel,
            }),
        }
    }
}
