//! Products of many rows, with panels of columns that are unpacked into working memory first.

mod bytes;
mod floats;
mod halves;

pub(super) use bytes::Bytes;
pub(super) use floats::Floats;
pub(super) use halves::{Halves, Tiled};

use super::activations::Segment;
use super::{Activations, Level, Row};
use crate::memory::Sections;
use moh_operators::Error;
use std::ops::Range;

/// Inner indices of a panel: a multiple of every block and of the values in a vector of any weight.
const DEPTH: usize = 512;

/// The memory of a panel.
pub(super) fn sections(x: &Activations<'_>) -> Result<Sections, Error> {
    let mut sections = Sections::default();
    if x.rows > super::FEW {
        match x.level {
            _ if x.unit.is_some() => halves::Layout::new(x, &mut sections).map(|_| ())?,
            Level::Int8 => bytes::Layout::new(x, &mut sections).map(|_| ())?,
            Level::Float => floats::Layout::new(x, &mut sections).map(|_| ())?,
        }
    }
    Ok(sections)
}

/// Ranges of blocks inside `panel` with the rows, as positions in `rows`, that use them; those without rows are left out.
fn products(
    panel: &Range<usize>,
    rows: &[Row],
    all: usize,
    segments: Option<&[Segment]>,
) -> Vec<(Range<usize>, Vec<u32>)> {
    let Some(segments) = segments else {
        return vec![(panel.clone(), (0..rows.len() as u32).collect())];
    };
    let inside = |segment: &Segment| segment.blocks.start.max(panel.start)..segment.blocks.end.min(panel.end);
    let picked = |segment: &Segment| match rows.len() == all {
        true => segment.rows.clone(),
        false => {
            let position = |index: &u32| rows.binary_search_by_key(index, |row| row.index).ok();
            segment.rows.iter().filter_map(position).map(|position| position as u32).collect()
        }
    };
    let overlap = segments.iter().filter(|segment| !inside(segment).is_empty());
    overlap.map(|segment| (inside(segment), picked(segment))).filter(|(_, rows)| !rows.is_empty()).collect()
}
