//! Bytes of constants: in memory, or mapped from the file that a model keeps its weights in.
//!
//! A mapped file must not be changed or cut while the model is used, as for every program that maps weights.

use memmap2::{Mmap, MmapOptions};
use std::fs::File;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use tract_onnx::model::ParsingContext;
use tract_onnx::pb::TensorProto;
use tract_onnx::pb::tensor_proto::{DataLocation, DataType};
use tract_onnx::tract_hir::internal::*;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Read-only bytes, aligned for every element type; a clone shares them.
#[derive(Debug, Clone)]
pub(crate) struct Bytes {
    store: Arc<Store>,
    len: usize,
}

#[derive(Debug)]
enum Store {
    Heap(Vec<u64>),
    Mapped(Mmap),
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Bytes) -> bool {
        Arc::ptr_eq(&self.store, &other.store)
    }
}

impl Eq for Bytes {}

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Bytes {
        Bytes::made(bytes.len(), |copy| copy.copy_from_slice(bytes))
    }
}

/// The file that a location leads to. A location is part of the model, which may come from anywhere: as in tract itself, it is a path
/// below the model's folder, and the file lies there.
fn inside(folder: &Path, location: &str) -> TractResult<PathBuf> {
    let is_below =
        Path::new(location).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    ensure!(is_below, "its data would be in {location:?}: expected a path inside the model's folder");
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let path = folder.join(location);
    let canonical = |path: &Path| path.canonicalize().with_context(|| path.display().to_string());
    let leads_out = !canonical(&path)?.starts_with(canonical(folder)?);
    ensure!(!leads_out, "its data file {location:?} is a link out of the model's folder");
    Ok(path)
}

impl Bytes {
    /// `len` bytes on the heap, zeroed, then written by `fill`.
    pub(crate) fn made(len: usize, fill: impl FnOnce(&mut [u8])) -> Bytes {
        let mut words = vec![0u64; len.div_ceil(size_of::<u64>())];
        fill(&mut words.as_mut_bytes()[..len]);
        Bytes { store: Arc::new(Store::Heap(words)), len }
    }

    /// The elements of a tensor of a model in `folder`, in their little-endian form; 4-bit elements two a byte.
    ///
    /// A tensor in another file is mapped, and its pages are read when they are needed.
    pub(crate) fn of(tensor: &TensorProto, folder: Option<&str>) -> TractResult<Bytes> {
        if tensor.data_location == Some(DataLocation::External as i32) {
            return Bytes::external(tensor, folder).with_context(|| format!("reading {}", tensor.name));
        }
        if !tensor.raw_data.is_empty() {
            return Ok(tensor.raw_data.as_slice().into());
        }
        let bytes: Vec<u8> = match DataType::try_from(tensor.data_type) {
            Ok(DataType::Float) => tensor.float_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Ok(DataType::Float16) => tensor.int32_data.iter().flat_map(|&x| (x as u16).to_le_bytes()).collect(),
            Ok(DataType::Uint8 | DataType::Int8 | DataType::Uint4 | DataType::Int4) => {
                tensor.int32_data.iter().map(|&x| x as u8).collect()
            }
            found => bail!("{}: expected float32, float16, or integers of 4 or 8 bits, found {found:?}", tensor.name),
        };
        Ok(bytes.as_slice().into())
    }

    fn external(tensor: &TensorProto, folder: Option<&str>) -> TractResult<Bytes> {
        let entry = |key: &str| tensor.external_data.iter().find(|entry| entry.key == key);
        let number = |key: &str| entry(key).map(|entry| entry.value.parse::<u64>()).transpose();
        let location = &entry("location").context("its data is in another file, which is not named")?.value;
        let folder = folder.context("its data is in another file, and the model's folder is not known")?;
        let path = inside(Path::new(folder), location)?;
        let file = File::open(&path).with_context(|| path.display().to_string())?;
        let found = file.metadata()?.len();
        let offset = number("offset")?.unwrap_or(0);
        let len = number("length")?.unwrap_or(found.saturating_sub(offset));
        ensure!(
            offset.checked_add(len).is_some_and(|end| end <= found),
            "{} is truncated: expected at least {} bytes, found {found}",
            path.display(),
            offset.saturating_add(len)
        );
        let len = usize::try_from(len)?;
        if len == 0 {
            return Ok(Bytes::made(0, |_| ()));
        }
        // SAFETY: the mapping is private and read-only, and lies in the file; that nobody cuts the file meanwhile is asked of the user
        // in this module's documentation, for no system call can ensure it.
        let map = unsafe { MmapOptions::new().offset(offset).len(len).map(&file)? };
        if !map.as_ptr().addr().is_multiple_of(bits(tensor)?.div_ceil(8)) {
            return Ok((&*map).into());
        }
        Ok(Bytes { store: Arc::new(Store::Mapped(map)), len })
    }

    /// The bytes.
    pub(crate) fn as_slice(&self) -> &[u8] {
        match &*self.store {
            Store::Heap(words) => &words.as_bytes()[..self.len],
            Store::Mapped(map) => map,
        }
    }

    /// The bytes as elements of `T`.
    pub(crate) fn cast<T: FromBytes + Immutable>(&self) -> TractResult<&[T]> {
        <[T]>::ref_from_bytes(self.as_slice())
            .map_err(|_| format_err!("expected whole elements, found {} bytes", self.len))
    }
}

/// The type and bytes of a tensor that a node reads, with its shape checked to be `expected`.
pub(crate) fn read(context: &ParsingContext, tensor: &TensorProto, expected: &[usize]) -> TractResult<Bytes> {
    let bits = bits(tensor)?;
    let bytes = Bytes::of(tensor, context.model_dir)?;
    let count = expected.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).context("a tensor that no memory holds")?;
    let dims = tensor.dims.iter().try_fold(1i64, |n, &d| n.checked_mul(d));
    ensure!(dims == i64::try_from(count).ok(), "{}: expected shape {expected:?}, found {:?}", tensor.name, tensor.dims);
    let wanted = count.checked_mul(bits).context("a tensor that no memory holds")?.div_ceil(8);
    ensure!(bytes.len == wanted, "{}: expected {wanted} bytes, found {}", tensor.name, bytes.len);
    Ok(bytes)
}

/// Bits of one element of the types that weights have.
fn bits(tensor: &TensorProto) -> TractResult<usize> {
    Ok(match DataType::try_from(tensor.data_type) {
        Ok(DataType::Float) => 32,
        Ok(DataType::Float16) => 16,
        Ok(DataType::Uint8 | DataType::Int8) => 8,
        Ok(DataType::Uint4 | DataType::Int4) => 4,
        found => bail!("{}: expected float32, float16, or integers of 4 or 8 bits, found {found:?}", tensor.name),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn data_is_inside_the_models_folder() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("model");
        std::fs::create_dir_all(folder.join("data")).unwrap();
        for file in ["model/weights", "model/data/weights", "secret"] {
            std::fs::write(root.path().join(file), "1234").unwrap();
        }
        let found = |location: &str| inside(&folder, location).map_err(|e| e.to_string());
        for good in ["weights", "./weights", "data/weights"] {
            assert_eq!(found(good).unwrap(), folder.join(good));
        }
        let absolute = root.path().join("secret");
        for bad in ["../secret", "data/../../secret", absolute.to_str().unwrap()] {
            assert!(found(bad).unwrap_err().contains("expected a path inside"), "{bad}");
        }
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("../secret", folder.join("link")).unwrap();
            assert!(found("link").unwrap_err().contains("is a link out of"));
        }
        assert!(found("nothing").unwrap_err().contains("nothing"));
    }
}
