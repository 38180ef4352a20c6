//! Files: weights streamed from the mapped checkpoint, everything prepared in a folder beside the output, then committed.

use crate::encode::Plan;
use crate::error::Error;
use crate::graph::{ElementType, Graph, Initializer, Source};
use moh_models::presets::Preset;
use moh_models::{Checkpoint, Weight, WeightType};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Bytes converted at a time: memory does not grow with the model.
const CHUNK_BYTES: usize = 4 << 20;

/// The folder in which an export is prepared; it and what is in it vanish unless the export is committed.
pub struct Staging {
    folder: tempfile::TempDir,
    output: PathBuf,
    /// Dropped after `folder`: only then are they empty.
    _made: NewFolders,
}

/// Folders that were made for an output, outermost first; those that are still empty in the end vanish.
pub(crate) struct NewFolders(Vec<PathBuf>);

impl NewFolders {
    /// Makes `folder` and what leads to it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(crate) fn make(folder: &Path) -> Result<NewFolders, Error> {
        let missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
        let missing: Vec<&Path> = folder.ancestors().take_while(missing).collect();
        let mut made = NewFolders(Vec::new());
        for path in missing.into_iter().rev() {
            fs::create_dir(path).map_err(Error::io(path))?;
            made.0.push(path.to_owned());
        }
        Ok(made)
    }
}

impl Drop for NewFolders {
    fn drop(&mut self) {
        for folder in self.0.iter().rev() {
            // Refused where it holds something.
            let _ = fs::remove_dir(folder);
        }
    }
}

/// Name of the weight file that belongs to a model file.
pub fn data_name(model: &Path) -> String {
    format!("{}_data", model.file_name().unwrap_or_default().to_string_lossy())
}

impl Staging {
    /// Makes the output's folder, and a hidden one in it.
    ///
    /// # Errors
    /// [`Error::Io`] where that is not allowed or there is no room.
    pub fn new(output: &Path) -> Result<Staging, Error> {
        let parent = match output.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        let made = NewFolders::make(&parent)?;
        let folder = tempfile::Builder::new().prefix(".moh-export-").tempdir_in(&parent).map_err(Error::io(&parent))?;
        Ok(Staging { folder, output: output.to_owned(), _made: made })
    }

    /// Where `name` is prepared.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Where the model is prepared: it has its final name, and finds its weights beside it.
    pub fn model(&self) -> PathBuf {
        self.folder.path().join(self.output.file_name().unwrap_or_default())
    }

    /// Puts the prepared files in their places: at every instant there is the old model, the new one, or none.
    ///
    /// # Errors
    /// [`Error::Io`]; then there is no model file.
    pub fn commit(self, side_files: &[String]) -> Result<Vec<PathBuf>, Error> {
        let parent = self.output.parent().unwrap_or(Path::new("")).to_owned();
        match fs::remove_file(&self.output) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io(&self.output)(e)),
            _ => {}
        }
        let mut written = Vec::new();
        let data = data_name(&self.output);
        let model = self.output.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for name in [&data].into_iter().chain(side_files).chain([&model]) {
            let (from, to) = (self.path(name), parent.join(name));
            if from.exists() {
                fs::rename(&from, &to).map_err(Error::io(&to))?;
                written.push(to);
            }
        }
        Ok(written)
    }
}

/// Writes a whole file and syncs it.
///
/// # Errors
/// [`Error::Io`].
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut file = File::create(path).map_err(Error::io(path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(Error::io(path))
}

/// Writes the weight file that `plan` lays out; returns its length, 0 (and no file) where the model has no large tensor.
///
/// # Errors
/// [`Error::Io`]; a weight that is NaN or infinite, or beyond the file's type.
pub fn write_data(graph: &Graph, plan: &Plan, path: &Path) -> Result<u64, Error> {
    let mut places = plan.iter().peekable();
    if places.peek().is_none() {
        return Ok(0);
    }
    let file = File::create(path).map_err(Error::io(path))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let mut position = 0u64;
    for (name, offset) in places {
        let Some(init) = graph.initializers.iter().find(|init| init.name == name) else {
            return Err(moh_models::Error::Internal("a place in the weight file without a tensor").into());
        };
        out.write_all(&vec![0; (offset - position) as usize]).map_err(Error::io(path))?;
        write_initializer(init, &mut out).map_err(|e| e.on(path))?;
        position = offset + init.bytes() as u64;
    }
    let file = out.into_inner().map_err(|e| Error::io(path)(e.into_error()))?;
    file.sync_all().map_err(Error::io(path))?;
    Ok(position)
}

/// Writes an initializer's elements, converted to its type.
///
/// # Errors
/// [`Error::Io`] with an empty path; a weight that is NaN or infinite, or beyond the type.
pub(crate) fn write_initializer(init: &Initializer, out: &mut impl Write) -> Result<(), Error> {
    match &init.source {
        Source::Bytes(bytes) => out.write_all(bytes).map_err(Error::io("")),
        Source::Weight { weight, transposed: true } => transposed(weight, init.ty, out),
        Source::Weight { weight, transposed: false } => straight(weight, init.ty, out),
    }
}

fn straight(weight: &Weight, ty: ElementType, out: &mut impl Write) -> Result<(), Error> {
    let size = weight.dtype().bytes();
    let (mut values, mut bytes) = (Vec::new(), Vec::new());
    let step = CHUNK_BYTES / 4;
    for start in (0..weight.elements()).step_by(step) {
        let end = (start + step).min(weight.elements());
        values.clear();
        weight.read_f32(start..end, &mut values);
        for (i, &value) in values.iter().enumerate() {
            check(weight, ty, start + i, value)?;
        }
        if same_type(weight.dtype(), ty) {
            out.write_all(&weight.bytes()[start * size..end * size]).map_err(Error::io(""))?;
        } else {
            bytes.clear();
            append(ty, &values, &mut bytes);
            out.write_all(&bytes).map_err(Error::io(""))?;
        }
    }
    Ok(())
}

/// Writes a matrix (rows, columns) as (columns, rows), a band of columns at a time.
fn transposed(weight: &Weight, ty: ElementType, out: &mut impl Write) -> Result<(), Error> {
    let &[rows, columns] = weight.shape() else {
        return Err(moh_models::Error::Internal("a transposed tensor that is no matrix").into());
    };
    // A band holds whole cache lines of a row, so that the source is read once.
    let band = (CHUNK_BYTES / 4 / rows.max(1)).next_multiple_of(32).min(columns.max(1));
    let (mut part, mut values, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
    for start in (0..columns).step_by(band) {
        let width = band.min(columns - start);
        values.clear();
        values.resize(width * rows, 0.0);
        for row in 0..rows {
            part.clear();
            let first = row * columns + start;
            weight.read_f32(first..first + width, &mut part);
            for (i, &value) in part.iter().enumerate() {
                check(weight, ty, first + i, value)?;
                values[i * rows + row] = value;
            }
        }
        bytes.clear();
        append(ty, &values, &mut bytes);
        out.write_all(&bytes).map_err(Error::io(""))?;
    }
    Ok(())
}

fn same_type(weight: WeightType, ty: ElementType) -> bool {
    matches!(
        (weight, ty),
        (WeightType::F32, ElementType::F32)
            | (WeightType::F16, ElementType::F16)
            | (WeightType::BF16, ElementType::BF16)
    )
}

/// Whether `ty` can hold the value.
#[inline]
fn check(weight: &Weight, ty: ElementType, index: usize, value: f32) -> Result<(), Error> {
    // Half of the step beyond the largest finite f16 rounds to infinity.
    const F16_LIMIT: f32 = 65_520.0;
    if value.is_finite() && (ty != ElementType::F16 || value.abs() < F16_LIMIT) {
        return Ok(());
    }
    let (file, tensor) = (weight.file().to_owned(), weight.name().to_owned());
    Err(match value.is_finite() {
        false => moh_models::Error::NotFinite { file, tensor, index, value: f64::from(value) }.into(),
        true => Error::Range { file, tensor, index, value, ty },
    })
}

/// Appends the values as little-endian elements of `ty`.
fn append(ty: ElementType, values: &[f32], bytes: &mut Vec<u8>) {
    match ty {
        ElementType::F16 => bytes.extend(values.iter().flat_map(|&v| half::f16::from_f32(v).to_le_bytes())),
        ElementType::BF16 => bytes.extend(values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes())),
        _ => bytes.extend(values.iter().flat_map(|v| v.to_le_bytes())),
    }
}

/// Files of a checkpoint that its users need beside the exported model.
const SIDE_FILES: &[&str] = &[
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
];

/// Where the contents of a side file come from.
#[derive(Debug)]
pub enum Side {
    /// A file of the checkpoint.
    File(PathBuf),
    /// The configuration of a preset.
    Preset(&'static Preset),
}

impl Side {
    fn contents(&self) -> Result<Vec<u8>, Error> {
        match self {
            Side::File(path) => fs::read(path).map_err(Error::io(path)),
            Side::Preset(preset) => Ok(preset.config.as_bytes().to_vec()),
        }
    }

    /// Writes the contents to `path`.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        match self {
            Side::File(source) => fs::copy(source, path).map(drop).map_err(Error::io(source)),
            Side::Preset(preset) => write_file(path, preset.config.as_bytes()),
        }
    }
}

/// The side files of a checkpoint that are not in `target` already, the configuration in use as config.json among them.
///
/// # Errors
/// [`Error::SideFile`] where another file of that name is there and `force` is not set.
pub fn side_files(checkpoint: &Checkpoint, target: &Path, force: bool) -> Result<Vec<(&'static str, Side)>, Error> {
    let mut files = Vec::new();
    for &name in SIDE_FILES {
        let side = match (name, checkpoint.preset()) {
            ("config.json", Some(preset)) => Side::Preset(preset),
            ("config.json", None) => Side::File(checkpoint.config().path().to_owned()),
            _ => Side::File(checkpoint.folder().join(name)),
        };
        if matches!(&side, Side::File(source) if !source.is_file()) {
            continue;
        }
        let path = target.join(name);
        match fs::read(&path) {
            Ok(there) if side.contents()? == there => {}
            Ok(_) if !force => {
                let source_file = match side {
                    Side::File(source) => source,
                    Side::Preset(_) => checkpoint.config().path().to_owned(),
                };
                return Err(Error::SideFile { path, source_file });
            }
            _ => files.push((name, side)),
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests;
