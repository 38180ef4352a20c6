//! What takes the place of AMX where there is none.

use super::TileProduct;

#[derive(Debug, Clone, Copy)]
pub(crate) enum Amx {}

pub(crate) enum Tiles {}

impl Amx {
    pub(crate) fn tiles(self) -> Tiles {
        match self {}
    }
}

impl Tiles {
    pub(crate) unsafe fn pair(&self, _: &TileProduct) {
        match *self {}
    }

    pub(crate) unsafe fn single(&self, _: &TileProduct) {
        match *self {}
    }
}
