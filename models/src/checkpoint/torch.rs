//! Files that torch.save wrote, in the form that it has since PyTorch 1.6: a zip file with a pickle that says which tensors
//! there are, and one entry of bytes for each storage. No code in the file is ever run.

mod pickle;
mod state;
mod tensor;
mod zip;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::map::Map;
use super::{Container, Weight, WeightType};
use crate::error::{ArchiveFault, Error};
use pickle::{Node, Pickle, Tensor};
use tensor::{View, element_type};
use zip::Archive;

/// Maps a file and checks the tensors of the dictionary below `key`, or of the only one that holds weights.
pub(super) fn read(file: &Path, key: Option<&str>) -> Result<Container, Error> {
    let map = Arc::new(Map::open(file)?);
    if let Some(found) = other_format(map.bytes()) {
        return Err(Error::NotTorch { file: file.to_owned(), found });
    }
    let archive = Archive::open(map.bytes()).map_err(|fault| Error::Archive { file: file.to_owned(), fault })?;
    let reader = Reader { file, map: &map, folder: folder(file, &archive)?, archive };
    reader.check_byte_order()?;
    let bytes = reader.entry("data.pkl")?;
    let pickle = pickle::parse(bytes).map_err(|fault| Error::Pickle { file: file.to_owned(), fault })?;
    let state = state::choose(file, &pickle, key)?;
    reader.container(&pickle, state)
}

/// What a file is that is no zip file, and what to do about it.
fn other_format(bytes: &[u8]) -> Option<&'static str> {
    const LEGACY: &[u8] = &[0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
    if bytes.starts_with(b"PK\x03\x04") {
        return None;
    }
    Some(match bytes {
        [] => "an empty file",
        [0x80, _, rest @ ..] if rest.starts_with(LEGACY) => {
            "a file in PyTorch's form before 1.6: load it in PyTorch and save it again"
        }
        [0x80, ..] => "a pickle without tensors of PyTorch's",
        [_, _, _, _, _, _, _, _, b'{', ..] => "a safetensors file: its name should end in .safetensors",
        _ if bytes.starts_with(b"version https://git-lfs") => "a pointer of Git LFS: fetch the file itself",
        _ if bytes.get(257..262) == Some(b"ustar") => {
            "a tar file, PyTorch's form before 0.1.10: load it in PyTorch and save it again"
        }
        _ => "no zip file",
    })
}

/// The folder in the archive that holds everything.
fn folder<'a>(file: &Path, archive: &Archive<'a>) -> Result<&'a str, Error> {
    let mut folders = archive.names().filter_map(|name| name.strip_suffix("/data.pkl")).filter(|f| !f.contains('/'));
    let not_torch = |found| Error::NotTorch { file: file.to_owned(), found };
    let folder = folders.next().ok_or_else(|| not_torch("a zip file without data.pkl"))?;
    if folders.next().is_some() {
        return Err(not_torch("a zip file with more than one data.pkl"));
    }
    if archive.names().any(|name| name.strip_prefix(folder) == Some("/constants.pkl")) {
        return Err(not_torch("a TorchScript program: load it in PyTorch and save its state_dict()"));
    }
    Ok(folder)
}

struct Reader<'a> {
    file: &'a Path,
    map: &'a Arc<Map>,
    archive: Archive<'a>,
    folder: &'a str,
}

impl<'a> Reader<'a> {
    fn archive_error(&self, fault: ArchiveFault) -> Error {
        Error::Archive { file: self.file.to_owned(), fault }
    }

    fn entry(&self, name: &str) -> Result<&'a [u8], Error> {
        self.archive.read(&format!("{}/{name}", self.folder)).map_err(|fault| self.archive_error(fault))
    }

    /// Files from before PyTorch 2.1 do not say their byte order, which is then that of nearly all machines.
    fn check_byte_order(&self) -> Result<(), Error> {
        let name = format!("{}/byteorder", self.folder);
        if !self.archive.names().any(|found| found == name) {
            return Ok(());
        }
        match self.entry("byteorder")? {
            b"little" => Ok(()),
            other => {
                let found = String::from_utf8_lossy(&other[..other.len().min(20)]).into_owned();
                Err(Error::ByteOrder { file: self.file.to_owned(), found })
            }
        }
    }

    fn container(&self, pickle: &Pickle<'a>, state: state::State<'a>) -> Result<Container, Error> {
        let (mut tensors, mut unreadable) = (Vec::new(), BTreeMap::new());
        let mut left = self.map.bytes().len();
        for (name, value) in state.entries {
            match pickle.node(value) {
                Some(Node::Tensor(tensor)) => match element_type(&tensor.storage) {
                    Some(dtype) => tensors.push(self.weight(name, pickle, tensor, dtype, &mut left)?),
                    None => {
                        unreadable.insert(name.to_owned(), format!("elements of type {}", tensor.storage.class));
                    }
                },
                Some(Node::Opaque(global)) => {
                    unreadable.insert(name.to_owned(), format!("an object of {global}"));
                }
                _ => {}
            }
        }
        if tensors.is_empty() {
            return Err(Error::NoTensors { file: self.file.to_owned() });
        }
        let weights_key = state.key.map(str::to_owned);
        Ok(Container { tensors, unreadable, weights_key, ..Container::default() })
    }

    fn weight(
        &self,
        name: &str,
        pickle: &Pickle<'a>,
        tensor: &Tensor<'a>,
        dtype: WeightType,
        left: &mut usize,
    ) -> Result<Weight, Error> {
        let fault = |fault| Error::TorchTensor { file: self.file.to_owned(), tensor: name.to_owned(), fault };
        let entry = format!("{}/data/{}", self.folder, tensor.storage.key);
        let storage = self.archive.range(&entry).map_err(|fault| self.archive_error(fault))?;
        let view = View::check(pickle, tensor, dtype, storage.len()).map_err(fault)?;
        let size = dtype.bytes();
        if let Some(elements) = view.contiguous() {
            let range = storage.start + elements.start * size..storage.start + elements.end * size;
            return Ok(Weight::mapped(name.to_owned(), view.shape, dtype, Arc::clone(self.map), range));
        }
        let bytes = view.copy(&self.map.bytes()[storage], size, left).map_err(fault)?;
        Ok(Weight::copied(name.to_owned(), view.shape, dtype, self.file, bytes))
    }
}
