//! A worker's products.

use super::activations::{Activations, Used};
use super::{Level, NBits, Row, Start, panel, stream};
use crate::host::Host;
use crate::memory::Uncleared;
use moh_operators::{DType, Element, Error};
use std::ops::Range;

/// A worker's working memory.
pub(crate) struct Worker<'h> {
    panel: Uncleared<'h>,
}

impl<'h> Worker<'h> {
    /// Working memory for products with `x`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn new(x: &Activations<'_>, host: &'h dyn Host) -> Result<Worker<'h>, Error> {
        let mut panel = panel::sections(x)?.allocate_unwritten(host)?;
        if x.unit.is_none() && x.level == Level::Float {
            panel.clear();
        }
        Ok(Worker { panel })
    }

    /// Adds the products of `rows`, which are ascending, with columns of `weight` to the rows' sums, which begin as `start` says. Returns
    /// the number of multiply-accumulate operations.
    ///
    /// # Safety
    /// The sums are valid for writing as many floats as there are columns, for reading with [`Start::Sums`], and do not overlap. `x` was made for the
    /// weight's format and has the rows.
    pub(crate) unsafe fn multiply(
        &mut self,
        weight: &NBits<'_>,
        x: &Activations<'_>,
        rows: &[Row],
        columns: Range<usize>,
        start: Start<'_>,
    ) -> u64 {
        assert!(weight.format == x.format, "{:?} multiplied by activations for {:?}", weight.format, x.format);
        assert!(columns.end <= weight.n, "columns {columns:?} of {}", weight.n);
        if let Start::New(Some(bias)) = start {
            assert!(bias.len() == columns.len(), "a bias of {} for {columns:?}", bias.len());
        }
        if rows.is_empty() || columns.is_empty() {
            return 0;
        }
        // The first products of rows that use all inner indices are written, not added.
        let at_once = x.unit.is_some() || x.level == Level::Int8;
        let is_written = at_once && matches!(x.used, Used::Segments(None)) && weight.format.k > 0;
        let start = match start {
            Start::New(bias) if !is_written => {
                for row in rows {
                    // SAFETY: the caller's contract.
                    unsafe {
                        match bias {
                            Some(bias) => std::ptr::copy_nonoverlapping(bias.as_ptr(), row.output, columns.len()),
                            None => row.output.write_bytes(0, columns.len()),
                        }
                    }
                }
                Start::Sums
            }
            start => start,
        };
        match (&x.used, x.level) {
            (Used::Ranges(ranges), _) => x.engine.run(stream::Stream { weight, x, rows, columns, ranges }),
            (Used::Segments(segments), _) if let Some(unit) = x.unit => x.engine.run(panel::Halves {
                unit,
                weight,
                x,
                rows,
                columns,
                segments: segments.as_deref(),
                start,
                panel: &self.panel,
            }),
            (Used::Segments(segments), Level::Int8) => x.engine.run(panel::Bytes {
                weight,
                x,
                rows,
                columns,
                segments: segments.as_deref(),
                start,
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

/// Numbers that are f32 already.
pub(crate) fn floats<X: Element>(numbers: &[X]) -> Option<&[f32]> {
    // SAFETY: the type that corresponds to DTYPE is f32.
    (X::DTYPE == DType::F32).then(|| unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), numbers.len()) })
}
