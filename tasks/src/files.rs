//! Files: named tensors in safetensors, settings in JSON.

use crate::error::{Error, Result};
use moh_runtime::{Data, ElementType, Tensor, TensorData};
use safetensors::{Dtype, SafeTensors, View};
use serde::de::DeserializeOwned;
use std::borrow::Cow;
use std::io::Write;
use std::path::Path;

/// Every tensor of the safetensors file in `path`, by name.
///
/// # Errors
/// [`Error::NotFound`], [`Error::Read`] or [`Error::Malformed`] for the file, [`Error::Runtime`] for a tensor of a type
/// that is not in [`ElementType`].
pub fn read_tensors(path: &Path) -> Result<Vec<(String, Tensor)>> {
    let bytes = std::fs::read(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => Error::NotFound { path: path.to_owned(), what: "input file" },
        _ => Error::Read { path: path.to_owned(), source },
    })?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| Error::malformed(path, "a safetensors file", e))?;
    let mut tensors = Vec::new();
    for (name, view) in file.tensors() {
        let data =
            decode(view.dtype(), view.data()).ok_or_else(|| unknown_type(&name, format!("{:?}", view.dtype())))?;
        let tensor = Tensor::from_data(view.shape().to_vec(), data)
            .map_err(|e| Error::malformed(path, "a safetensors file", e))?;
        tensors.push((name, tensor));
    }
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(tensors)
}

/// Writes tensors to a safetensors file: whole under its name, or not at all.
///
/// # Errors
/// [`Error::Write`], where `overwrite` is false also for a file that exists.
pub fn write_tensors(path: &Path, tensors: &[(String, Tensor)], overwrite: bool) -> Result<()> {
    let write = |source| Error::Write { path: path.to_owned(), source };
    let views = tensors.iter().map(|(name, tensor)| (name.as_str(), Borrowed(tensor)));
    let bytes = safetensors::serialize(views, None).map_err(|e| write(std::io::Error::other(e)))?;
    write_whole(path, &bytes, overwrite)
}

/// Writes a text file: whole under its name, or not at all.
///
/// # Errors
/// [`Error::Write`], where `overwrite` is false also for a file that exists.
pub fn write_text(path: &Path, text: &str, overwrite: bool) -> Result<()> {
    write_whole(path, text.as_bytes(), overwrite)
}

/// Writes a file: whole under its name, or not at all.
pub(crate) fn write_whole(path: &Path, bytes: &[u8], overwrite: bool) -> Result<()> {
    let write = |source| Error::Write { path: path.to_owned(), source };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".moh-run-");
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    let mut file = builder.tempfile_in(folder).map_err(write)?;
    file.write_all(bytes).map_err(write)?;
    let persisted = if overwrite { file.persist(path) } else { file.persist_noclobber(path) };
    persisted.map(|_| ()).map_err(|e| write(e.error))
}

/// The content of a JSON file, or nothing where there is no file.
pub(crate) fn read_json<T: DeserializeOwned + Default>(path: &Path) -> Result<T> {
    match std::fs::read(path) {
        Ok(text) => {
            let malformed = |reason: String| Error::malformed(path, "a model configuration", reason);
            // An array would be read as the fields in their order.
            let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&text);
            if !text.trim_ascii_start().starts_with(b"{") {
                let found = String::from_utf8_lossy(&text[..text.len().min(20)]);
                return Err(malformed(format!("expected a JSON object, found {found:?}")));
            }
            serde_json::from_slice(text).map_err(|e| malformed(e.to_string()))
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(T::default()),
        Err(source) => Err(Error::Read { path: path.to_owned(), source }),
    }
}

fn unknown_type(tensor: &str, found: String) -> moh_runtime::Error {
    let expected: Vec<&str> = ElementType::ALL.iter().map(|ty| ty.name()).collect();
    let expected = format!("one of {}", expected.join(", "));
    moh_runtime::Error::ElementType { tensor: tensor.to_owned(), expected, found }
}

fn decode(dtype: Dtype, bytes: &[u8]) -> Option<TensorData> {
    let ty = match dtype {
        Dtype::F32 => ElementType::F32,
        Dtype::F16 => ElementType::F16,
        Dtype::BF16 => ElementType::BF16,
        Dtype::F64 => ElementType::F64,
        Dtype::I64 => ElementType::I64,
        Dtype::I32 => ElementType::I32,
        Dtype::U8 => ElementType::U8,
        Dtype::BOOL => ElementType::Bool,
        _ => return None,
    };
    ty.read(bytes)
}

struct Borrowed<'a>(&'a Tensor);

impl View for Borrowed<'_> {
    fn dtype(&self) -> Dtype {
        match self.0.element_type() {
            ElementType::F32 => Dtype::F32,
            ElementType::F16 => Dtype::F16,
            ElementType::BF16 => Dtype::BF16,
            ElementType::F64 => Dtype::F64,
            ElementType::I64 => Dtype::I64,
            ElementType::I32 => Dtype::I32,
            ElementType::U8 => Dtype::U8,
            ElementType::Bool => Dtype::BOOL,
        }
    }

    fn shape(&self) -> &[usize] {
        self.0.shape()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        match self.0.data() {
            Data::U8(x) => Cow::Borrowed(x),
            data => Cow::Owned(data.to_bytes()),
        }
    }

    fn data_len(&self) -> usize {
        self.0.data().len() * self.0.element_type().size()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use half::{bf16, f16};

    fn every_type() -> Vec<(String, Tensor)> {
        let tensors = vec![
            Tensor::new([2], vec![1.5f32, f32::NEG_INFINITY]).unwrap(),
            Tensor::new([1, 2], vec![f16::from_f32(0.5), f16::MIN]).unwrap(),
            Tensor::new([1], vec![bf16::from_f32(-3.0)]).unwrap(),
            Tensor::new([], vec![std::f64::consts::PI]).unwrap(),
            Tensor::new([2, 1], vec![i64::MIN, 7]).unwrap(),
            Tensor::new([1], vec![-5i32]).unwrap(),
            Tensor::new([3], vec![0u8, 128, 255]).unwrap(),
            Tensor::new([2], vec![true, false]).unwrap(),
        ];
        assert_eq!(tensors.len(), ElementType::ALL.len());
        tensors.into_iter().map(|tensor| (tensor.element_type().to_string(), tensor)).collect()
    }

    #[test]
    fn every_type_survives_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let mut tensors = every_type();
        tensors.push(("empty".to_owned(), Tensor::zeros(ElementType::F32, [2, 0]).unwrap()));
        write_tensors(&path, &tensors, false).unwrap();
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        assert_eq!(read_tensors(&path).unwrap(), tensors);
    }

    #[test]
    fn a_file_is_replaced_only_on_request_and_nothing_is_left_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        std::fs::write(&path, "old").unwrap();
        assert!(matches!(write_tensors(&path, &every_type(), false), Err(Error::Write { .. })));
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        write_tensors(&path, &every_type(), true).unwrap();
        assert_eq!(read_tensors(&path).unwrap().len(), 8);
        assert!(write_tensors(&folder.path().join("nowhere/t"), &every_type(), true).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn settings_are_an_object() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        let read = || read_json::<std::collections::BTreeMap<String, i64>>(&path);
        assert_eq!(read().unwrap().len(), 0);
        std::fs::write(&path, "\u{feff} {\"a\": 1}").unwrap();
        assert_eq!(read().unwrap()["a"], 1);
        for text in ["[]", "5", "", "null"] {
            std::fs::write(&path, text).unwrap();
            let message = format!("{:#}", anyhow::Error::from(read().unwrap_err()));
            let expected = format!("not a model configuration: expected a JSON object, found {text:?}");
            assert!(message.ends_with(&expected), "{message}");
        }
    }

    #[test]
    fn damaged_files_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        assert!(matches!(read_tensors(&path), Err(Error::NotFound { .. })));
        for bytes in [&b""[..], b"12345678", b"\x02\0\0\0\0\0\0\0{", &[0xFF; 64]] {
            std::fs::write(&path, bytes).unwrap();
            assert!(matches!(read_tensors(&path), Err(Error::Malformed { .. })), "{bytes:?}");
        }
    }
}
