//! Weights that stay in the checkpoint's files: hard links to these lie beside the model.

use super::{INLINE_BYTES, Plan, Start};
use crate::error::Error;
use crate::graph::{ElementType, Graph, Initializer, Source};
use crate::place::Place;
use moh_models::{Weight, WeightType};
use moh_runtime::{Digest, Link};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Tensors of fewer bytes are converted where their type is not the model's: single norms and routers often have another type.
const SMALL: usize = 1 << 20;

/// A file of the checkpoint.
#[derive(Debug, Clone)]
pub(crate) struct Linked {
    /// Its path; no symbolic link.
    pub(crate) source: PathBuf,
    /// What the model says of it.
    pub(crate) link: Link,
}

/// Leaves the large tensors where they are, and places those in the weight file that the model needs in another form.
pub(super) fn plan(graph: &Graph, dtype: ElementType, place: &Place) -> Result<Plan, Error> {
    let mut plan = Plan::default();
    let large = || graph.initializers.iter().filter(|init| init.bytes() >= INLINE_BYTES);
    let mut files: BTreeMap<&Path, usize> = BTreeMap::new();
    for init in large() {
        if let Some(weight) = stored(init, dtype)? {
            files.insert(weight.file(), 0);
        }
    }
    let count = files.len();
    for (i, (file, number)) in files.iter_mut().enumerate() {
        *number = i;
        plan.links.push(linked(file, link_name(&place.data, i + 1, count))?);
    }
    for init in large() {
        match stored(init, dtype)? {
            Some(weight) => {
                let start = Start { link: files.get(weight.file()).copied(), offset: weight.offset() };
                plan.starts.push((init.name.clone(), start));
            }
            None => plan.add(init),
        }
    }
    Ok(plan)
}

/// The tensor of the checkpoint that has the initializer's bytes as they are to be.
fn stored(init: &Initializer, dtype: ElementType) -> Result<Option<&Weight>, Error> {
    let weight = match &init.source {
        Source::Weight { weight, transposed: false } if weight.is_stored() => weight,
        _ => return Ok(None),
    };
    if weight.file().extension().is_none_or(|extension| extension != "safetensors") {
        return Err(Error::LinkFormat { file: weight.file().to_owned() });
    }
    let same = match weight.dtype() {
        WeightType::F32 => init.ty == ElementType::F32,
        WeightType::F16 => init.ty == ElementType::F16,
        WeightType::BF16 => init.ty == ElementType::BF16,
        _ => false,
    };
    if !same && init.ty == dtype && init.bytes() >= SMALL {
        let (file, tensor) = (weight.file().to_owned(), weight.name().to_owned());
        return Err(Error::LinkType { file, tensor, stored: weight.dtype(), ty: dtype });
    }
    Ok(same.then_some(weight))
}

fn linked(file: &Path, name: String) -> Result<Linked, Error> {
    // A snapshot of Hugging Face's hub holds links into a folder of blobs: a hard link to one of them would dangle.
    let source = file.canonicalize().map_err(Error::io(file))?;
    let link = Link::new(&source, name).map_err(Error::io(file))?;
    Ok(Linked { source, link })
}

/// The name of linked file `number` of `count` beside a model whose weight file is `data`.
fn link_name(data: &str, number: usize, count: usize) -> String {
    format!("{data}-{number:05}-of-{count:05}.safetensors")
}

/// Whether a file's name is one that [`plan`] gives to a link of the model whose weight file is `data`.
pub(crate) fn is_link_name(data: &str, name: &str) -> bool {
    let numbers = name.strip_prefix(data).and_then(|rest| rest.strip_prefix('-')?.strip_suffix(".safetensors"));
    let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.and_then(|numbers| numbers.split_once("-of-")).is_some_and(|(a, b)| is_number(a) && is_number(b))
}

impl Linked {
    /// Makes the link `to`, which is to be `path` in the end.
    ///
    /// # Errors
    /// [`Error::Link`] where the file system cannot do that.
    pub(crate) fn make(&self, to: &Path, path: PathBuf) -> Result<(), Error> {
        let refused = |reason| Error::Link { file: self.source.clone(), path, reason };
        std::fs::hard_link(&self.source, to).map_err(refused)
    }
}

/// Reads the linked files: notes the digests of their bytes, and checks that no tensor of theirs that `graph` uses holds NaN or
/// infinity. `progress` is told how many bytes were read.
///
/// # Errors
/// [`Error::Io`]; a weight that is NaN or infinite.
pub(crate) fn read_all(plan: &mut Plan, graph: &Graph, progress: &dyn Fn(u64)) -> Result<(), Error> {
    let mut before = 0;
    for Linked { source, link } in &mut plan.links {
        let (digest, length) =
            Digest::of_file(source, &mut |read| progress(before + read)).map_err(Error::io(&*source))?;
        link.contents = Some(digest);
        before += length;
    }
    let linked: BTreeMap<&str, Start> = plan.iter().filter(|(_, start)| start.link.is_some()).collect();
    for init in graph.initializers.iter().filter(|init| linked.contains_key(init.name.as_str())) {
        if let Source::Weight { weight, .. } = &init.source {
            weight.check_finite()?;
        }
    }
    Ok(())
}
