//! Files that torch.save wrote, in the form that it has since PyTorch 1.6: a zip file with a pickle that says which tensors
//! there are, and one entry of bytes for each storage. Also pickles of numpy arrays, which hold the bytes themselves, within such
//! a file or alone. No code in the file is ever run.

mod pickle;
mod state;
mod tensor;
mod zip;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::map::Source;
use super::{Container, Weight, WeightType};
use crate::error::{ArchiveFault, Error, TensorFault};
use memmap2::Mmap;
use pickle::{Array, Node, Pickle, Tensor};
use tensor::{View, array_bytes, array_type, element_type};
use zip::Archive;

/// Maps a file and checks the tensors of the dictionary below `key`, or of the only one that holds weights.
pub(super) fn read(file: &Path, key: Option<&str>) -> Result<Container, Error> {
    let source = Arc::new(Source::open(file)?);
    let map = source.map()?;
    if let Some(found) = other_format(&map) {
        return Err(Error::NotTorch { file: file.to_owned(), found });
    }
    let (zip, part) = match map.starts_with(PICKLE) {
        true => (None, "the pickle"),
        false => {
            let archive = Archive::open(&map).map_err(|fault| Error::Archive { file: file.to_owned(), fault })?;
            (Some(Zip { folder: folder(file, &archive)?, archive }), "data.pkl")
        }
    };
    let reader = Reader { file, source: &source, map: &map, zip };
    let bytes = match &reader.zip {
        None => &map,
        Some(zip) => {
            reader.check_byte_order(zip)?;
            reader.entry(zip, "data.pkl")?
        }
    };
    let pickle = pickle::parse(bytes).map_err(|fault| Error::Pickle { file: file.to_owned(), part, fault })?;
    let state = state::choose(file, &pickle, key)?;
    reader.container(&pickle, state)
}

/// How every pickle of protocol 2 or newer begins.
const PICKLE: &[u8] = &[0x80];

/// What a file is that is no zip file, and what to do about it.
fn other_format(bytes: &[u8]) -> Option<&'static str> {
    if bytes.starts_with(b"PK\x03\x04") || bytes.starts_with(PICKLE) && !legacy(bytes) {
        return None;
    }
    Some(match bytes {
        [] => "an empty file",
        [0x80, ..] => "a file in PyTorch's form before 1.6: load it in PyTorch and save it again",
        [_, _, _, _, _, _, _, _, b'{', ..] => "a safetensors file: its name should end in .safetensors",
        _ if bytes.starts_with(b"version https://git-lfs") => "a pointer of Git LFS: fetch the file itself",
        _ if bytes.get(257..262) == Some(b"ustar") => {
            "a tar file, PyTorch's form before 0.1.10: load it in PyTorch and save it again"
        }
        _ => "something else: neither a zip file nor a pickle of protocol 2 or newer",
    })
}

/// Whether a pickle is the first of several, a number that says so.
fn legacy(bytes: &[u8]) -> bool {
    const NUMBER: &[u8] = &[0x8a, 0x0a, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19];
    bytes.get(2..).is_some_and(|rest| rest.starts_with(NUMBER))
}

/// The folder in the archive that holds everything.
fn folder<'a>(file: &Path, archive: &Archive<'a>) -> Result<&'a str, Error> {
    let mut folders = archive.names().filter_map(|name| name.strip_suffix("/data.pkl")).filter(|f| !f.contains('/'));
    let not_torch = |found| Error::NotTorch { file: file.to_owned(), found };
    let arrays = || archive.names().any(|name| name.ends_with(".npy"));
    let folder = folders.next().ok_or_else(|| {
        not_torch(match arrays() {
            true => "a .npz file of numpy: save the arrays with safetensors.numpy.save_file",
            false => "a zip file without data.pkl",
        })
    })?;
    if folders.next().is_some() {
        return Err(not_torch("a zip file with more than one data.pkl"));
    }
    if archive.names().any(|name| name.strip_prefix(folder) == Some("/constants.pkl")) {
        return Err(not_torch("a TorchScript program: load it in PyTorch and save its state_dict()"));
    }
    Ok(folder)
}

struct Zip<'a> {
    archive: Archive<'a>,
    folder: &'a str,
}

struct Reader<'a> {
    file: &'a Path,
    source: &'a Arc<Source>,
    map: &'a Mmap,
    /// `None`: the file is a pickle.
    zip: Option<Zip<'a>>,
}

impl<'a> Reader<'a> {
    fn archive_error(&self, fault: ArchiveFault) -> Error {
        Error::Archive { file: self.file.to_owned(), fault }
    }

    fn entry(&self, zip: &Zip<'a>, name: &str) -> Result<&'a [u8], Error> {
        zip.archive.read(&format!("{}/{name}", zip.folder)).map_err(|fault| self.archive_error(fault))
    }

    /// Files from before PyTorch 2.1 do not say their byte order, which is then that of nearly all machines.
    fn check_byte_order(&self, zip: &Zip<'a>) -> Result<(), Error> {
        let name = format!("{}/byteorder", zip.folder);
        if !zip.archive.names().any(|found| found == name) {
            return Ok(());
        }
        match self.entry(zip, "byteorder")? {
            b"little" => Ok(()),
            other => {
                let found = String::from_utf8_lossy(&other[..other.len().min(20)]).into_owned();
                Err(Error::ByteOrder { file: self.file.to_owned(), found })
            }
        }
    }

    fn container(&self, pickle: &Pickle<'a>, state: state::State<'a>) -> Result<Container, Error> {
        let (mut tensors, mut unreadable) = (Vec::new(), BTreeMap::new());
        let mut left = self.map.len();
        for (name, value) in state.entries {
            let read = match (pickle.node(value), &self.zip) {
                (Some(Node::Tensor(tensor)), Some(zip)) => match element_type(&tensor.storage) {
                    Some(dtype) => self.weight(name, pickle, (zip, tensor), dtype, &mut left).map(Ok),
                    None => Ok(Err(format!("elements of type {}", tensor.storage.class))),
                },
                (Some(Node::Tensor(_)), None) => Ok(Err("a tensor whose elements are not in this file".to_owned())),
                (Some(Node::Array(array)), _) => self.array(name, pickle, array, &mut left),
                (Some(Node::Opaque(global)), _) => Ok(Err(format!("an object of {global}"))),
                _ => continue,
            };
            match read? {
                Ok(weight) => tensors.push(weight),
                Err(why) => drop(unreadable.insert(name.to_owned(), why)),
            }
        }
        if tensors.is_empty() {
            return Err(Error::NoTensors { file: self.file.to_owned() });
        }
        let weights_key = state.key.map(str::to_owned);
        let other_keys = state.others.into_iter().map(str::to_owned).collect();
        Ok(Container { tensors, unreadable, weights_key, other_keys, ..Container::default() })
    }

    fn weight(
        &self,
        name: &str,
        pickle: &Pickle<'a>,
        (zip, tensor): (&Zip<'a>, &Tensor<'a>),
        dtype: WeightType,
        left: &mut usize,
    ) -> Result<Weight, Error> {
        let fault = |fault| self.fault(name, fault);
        let entry = format!("{}/data/{}", zip.folder, tensor.storage.key);
        let storage = zip.archive.range(&entry).map_err(|fault| self.archive_error(fault))?;
        let view = View::check(pickle, tensor, dtype, storage.len()).map_err(fault)?;
        let size = dtype.bytes();
        if let Some(elements) = view.contiguous() {
            let offset = (storage.start + elements.start * size) as u64;
            return Ok(Weight::stored(name.to_owned(), view.shape, dtype, Arc::clone(self.source), offset));
        }
        let bytes = view.copy(&self.map[storage], size, left).map_err(fault)?;
        Ok(Weight::copied(name.to_owned(), view.shape, dtype, self.file, bytes))
    }

    /// An array, or why it can't be read.
    fn array(
        &self,
        name: &str,
        pickle: &Pickle<'a>,
        array: &Array<'a>,
        left: &mut usize,
    ) -> Result<Result<Weight, String>, Error> {
        let dtype = match array_type(pickle, array) {
            Ok(dtype) => dtype,
            Err(why) => return Ok(Err(why)),
        };
        let fault = |fault| self.fault(name, fault);
        let Some(bytes) = array_bytes(pickle, array, left) else {
            return Ok(Err("a numpy array whose elements are not bytes".to_owned()));
        };
        let bytes = bytes.map_err(fault)?;
        let view = View::of_array(pickle, array, dtype, bytes.len()).map_err(fault)?;
        let (name, size) = (name.to_owned(), dtype.bytes());
        Ok(Ok(match (view.contiguous(), bytes) {
            (None, bytes) => {
                let bytes = view.copy(&bytes, size, left).map_err(fault)?;
                Weight::copied(name, view.shape, dtype, self.file, bytes)
            }
            (Some(_), Cow::Owned(bytes)) => Weight::copied(name, view.shape, dtype, self.file, bytes),
            (Some(_), Cow::Borrowed(bytes)) => {
                // They are part of the map: an array is read in place.
                let offset = bytes.as_ptr().addr() - self.map.as_ptr().addr();
                Weight::stored(name, view.shape, dtype, Arc::clone(self.source), offset as u64)
            }
        }))
    }

    fn fault(&self, tensor: &str, fault: TensorFault) -> Error {
        Error::TorchTensor { file: self.file.to_owned(), tensor: tensor.to_owned(), fault }
    }
}
