//! The model families, and which one a checkpoint belongs to. A family is one file, and one line in `families!`.

mod outside;
mod resolve;

use crate::checkpoint::{Checkpoint, Config, DefaultValue, Prefix, Problem, WeightType};
use crate::count::{Count, Macs, Shape};
use crate::error::Error;
use crate::ops::{Ops, Result, Type};
use crate::router::HeadCounts;
use crate::sample::Sample;
use crate::warning::Warning;
use outside::Outside;
use std::collections::{BTreeMap, BTreeSet};

/// A dimension of an input or output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortDim {
    /// The same in every call.
    Fixed(usize),
    /// Chosen by the caller; equal names are equal sizes.
    Named(&'static str),
}

/// An input or output of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Element type.
    pub ty: Type,
    /// Dimensions, outermost first.
    pub dims: Vec<PortDim>,
}

impl Port {
    fn new(name: impl Into<String>, ty: Type, dims: &[PortDim]) -> Port {
        Port { name: name.into(), ty, dims: dims.to_vec() }
    }
}

/// One attention layer, for people and metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Module path: `blocks.0.attn`.
    pub path: String,
    /// Head counts.
    pub heads: HeadCounts,
    /// Key and value heads.
    pub kv_num_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// The sizes that multiply-accumulates are counted at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// Sizes of the named dimensions.
    pub sizes: Vec<(&'static str, usize)>,
    /// Tokens that one forward at these sizes handles.
    pub tokens: usize,
}

/// Sizes of named dimensions, `batch` or `past`, that are the same in every call; the others stay symbolic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sizes(BTreeMap<String, usize>);

impl Sizes {
    /// Pairs of a dimension's name and its size.
    pub fn new(sizes: impl IntoIterator<Item = (String, usize)>) -> Sizes {
        Sizes(sizes.into_iter().collect())
    }

    /// The size of dimension `name`, if it is fixed.
    pub fn get(&self, name: &str) -> Option<usize> {
        self.0.get(name).copied()
    }

    /// The names of the fixed dimensions.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    fn or(&self, name: &str, default: usize) -> usize {
        self.get(name).unwrap_or(default)
    }
}

/// A model's input values by name.
#[derive(Debug, Clone)]
pub struct Inputs<V>(BTreeMap<String, V>);

impl<V: Clone> Inputs<V> {
    /// Pairs of names and values.
    pub fn new(values: impl IntoIterator<Item = (String, V)>) -> Inputs<V> {
        Inputs(values.into_iter().collect())
    }

    /// The value of that name.
    ///
    /// # Errors
    /// [`Error::Input`] where there is none.
    pub fn get(&self, name: &str) -> Result<V> {
        self.0.get(name).cloned().ok_or_else(|| Error::Input(name.to_owned()))
    }
}

/// A model with its weights: everything that candle, the exporter and the counter need to know.
pub trait Family: Sized {
    /// Reads configuration and weights.
    ///
    /// # Errors
    /// A configuration value that makes no model, or the missing, misshapen and unexpected tensors, all at once.
    fn load(name: &str, checkpoint: &Checkpoint) -> Result<Self>;
    /// What is probably not as it was meant.
    fn warning(&self) -> Option<&Warning> {
        None
    }
    /// The attention layers, in order.
    fn layers(&self) -> Vec<Layer>;
    /// Inputs, in order.
    fn inputs(&self) -> Vec<Port>;
    /// Outputs, in the order of `forward`'s result.
    fn outputs(&self) -> Vec<Port>;
    /// The sizes to count multiply-accumulates at.
    fn workload(&self) -> Workload;
    /// The configuration's key that fixes how many tokens a call has, and its value for `tokens` of them or a few more; `None`
    /// where callers choose, or the model is made for one number.
    fn resized(&self, _tokens: usize) -> Option<(&'static str, usize)> {
        None
    }
    /// Calls of these sizes to verify an export with, between them every kind of input: padding, a filled cache, a null class.
    fn samples(&self, sizes: &Sizes) -> Vec<Vec<Sample>>;
    /// The model.
    fn forward<O: Ops>(&self, ops: &mut O, inputs: &Inputs<O::Value>) -> Result<Vec<O::Value>>;
}

/// Declares the families: a module and a type each, and the names that users may give.
macro_rules! families {
    ($($module:ident::$model:ident: $($name:literal)|+ ,)+) => {
        $(pub mod $module;)+

        /// Every family's names.
        pub const NAMES: &[&str] = &[$($($name),+),+];

        enum AnyFamily {
            $($model($module::$model),)+
            Outside(Outside),
        }

        impl AnyFamily {
            fn load(name: &str, checkpoint: &Checkpoint) -> Result<AnyFamily> {
                match name {
                    $($($name)|+ => Ok(AnyFamily::$model($module::$model::load(name, checkpoint)?)),)+
                    _ => Err(unknown(checkpoint, name)),
                }
            }

            fn warning(&self) -> Option<&Warning> {
                match self {
                    $(AnyFamily::$model(model) => model.warning(),)+
                    AnyFamily::Outside(_) => None,
                }
            }
        }

        macro_rules! each {
            ($any:expr, $inner:ident => $body:expr) => {
                match $any { $(AnyFamily::$model($inner) => $body,)+ AnyFamily::Outside($inner) => $body }
            };
        }
    };
}

families! {
    dit::Dit: "moh-dit" | "dit",
    llama::Llama: "moh-llama" | "moh-llm" | "gqe-llama" | "switchhead" | "llama",
    moa::Moa: "moa",
    vit::Vit: "moh-vit" | "vit",
}

fn unknown(checkpoint: &Checkpoint, name: &str) -> Error {
    Error::Family { file: checkpoint.config().path().to_owned(), found: name.to_owned(), known: NAMES.join(", ") }
}

/// Names and shapes of a model's tensors, in the order in which it asks for them.
pub type Tensors = Vec<(String, Vec<usize>)>;

/// More parameters than any machine holds, and few enough to count with.
const MAX_PARAMETERS: usize = 1 << 42;

/// A checkpoint read as a model of its family.
pub struct Model {
    name: String,
    family: AnyFamily,
    tensors: Tensors,
    weight_type: WeightType,
    prefix: Option<Prefix>,
    ignored: Vec<String>,
    defaults: Vec<DefaultValue>,
    warnings: Vec<Warning>,
}

impl Model {
    /// Reads `checkpoint` as `family`, or as the one that its configuration names.
    ///
    /// Where the names of tensors are the model's but for a prefix, it is removed or added ([`Model::prefix`]).
    ///
    /// # Errors
    /// An unknown, missing or wrong family; keys of the configuration that are misspelt ([`Error::UnusedKeys`]); several
    /// models in one checkpoint ([`Error::AmbiguousPrefix`]); see [`Family::load`].
    pub fn load(checkpoint: &Checkpoint, family: Option<&str>) -> Result<Model> {
        let name = match family {
            Some(name) => name.to_owned(),
            None => resolve::configured_family(checkpoint)?,
        };
        Model::read(checkpoint, &name).map_err(|error| resolve::explained(error, &name, checkpoint))
    }

    /// Reads `checkpoint` as a family of another crate, `name`. Its `forward` runs once, here, so it must not depend on which interpreter
    /// it is given; the model is then like any other: it runs in candle, is trained, counted and exported.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn of<F: Family + Send + Sync + 'static>(name: &str, checkpoint: &Checkpoint) -> Result<Model> {
        resolve::load(name, checkpoint, |checkpoint| Ok(AnyFamily::Outside(Outside::new(F::load(name, checkpoint)?)?)))
    }

    /// As [`Model::plan`], of a family of another crate.
    ///
    /// # Errors
    /// As [`Model::plan`].
    pub fn plan_of<F: Family + Send + Sync + 'static>(name: &str, config: &Config) -> Result<(Model, Tensors)> {
        planned(config, |checkpoint| Model::of::<F>(name, checkpoint))
    }

    /// As [`Model::load`], without looking for what may be wrong.
    pub(crate) fn read(checkpoint: &Checkpoint, name: &str) -> Result<Model> {
        resolve::load(name, checkpoint, |checkpoint| AnyFamily::load(name, checkpoint))
    }

    /// The model that `config` describes, without weights, and the names and shapes of the tensors that it has.
    ///
    /// # Errors
    /// As [`Model::load`], but for the tensors.
    pub fn plan(config: &Config, family: Option<&str>) -> Result<(Model, Tensors)> {
        planned(config, |checkpoint| Model::load(checkpoint, family))
    }

    /// The family's name: one of [`NAMES`], or that of [`Model::of`].
    pub fn family(&self) -> &str {
        &self.name
    }

    /// Numbers in the model's tensors.
    pub fn parameters(&self) -> usize {
        self.tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
    }

    /// The tensors of the model by its names. What else the checkpoint holds is none of them: what was ignored, another part's
    /// tensors, buffers.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// The element type of the largest tensor.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// What was done to the names in the files to make them the model's.
    pub fn prefix(&self) -> Option<&Prefix> {
        self.prefix.as_ref()
    }

    /// Tensors that were ignored as [`Checkpoint::ignore_unexpected`] says, by their names in the files.
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// The defaults that stand in for absent keys of the configuration, those of heads and routing first.
    pub fn defaults(&self) -> &[DefaultValue] {
        &self.defaults
    }

    /// What is probably not as its author meant it.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// See [`Family::layers`].
    pub fn layers(&self) -> Vec<Layer> {
        each!(&self.family, model => model.layers())
    }

    /// See [`Family::inputs`].
    pub fn inputs(&self) -> Vec<Port> {
        each!(&self.family, model => model.inputs())
    }

    /// See [`Family::outputs`].
    pub fn outputs(&self) -> Vec<Port> {
        each!(&self.family, model => model.outputs())
    }

    /// See [`Family::workload`].
    pub fn workload(&self) -> Workload {
        each!(&self.family, model => model.workload())
    }

    /// See [`Family::resized`].
    pub fn resized(&self, tokens: usize) -> Option<(&'static str, usize)> {
        each!(&self.family, model => model.resized(tokens))
    }

    /// See [`Family::samples`].
    pub fn samples(&self, sizes: &Sizes) -> Vec<Vec<Sample>> {
        each!(&self.family, model => model.samples(sizes))
    }

    /// Names of the dimensions that a caller chooses.
    pub fn dimensions(&self) -> BTreeSet<&'static str> {
        let named = |dim: PortDim| if let PortDim::Named(name) = dim { Some(name) } else { None };
        let names = self.inputs().into_iter().flat_map(|port| port.dims).filter_map(named);
        names.flat_map(|name| name.split('+')).collect()
    }

    /// See [`Family::forward`].
    ///
    /// # Errors
    /// What an operation of the interpreter fails with, or a missing input.
    pub fn forward<O: Ops>(&self, ops: &mut O, inputs: &Inputs<O::Value>) -> Result<Vec<O::Value>> {
        let given = inputs.0.iter().map(|(name, value)| Ok((name.clone(), ops.input(value.clone())?)));
        let inputs = Inputs(given.collect::<Result<_>>()?);
        let outputs = each!(&self.family, model => model.forward(ops, &inputs))?;
        outputs.into_iter().map(|output| ops.output(output)).collect()
    }

    /// Multiply-accumulates of one forward with the named dimensions at `sizes`.
    ///
    /// # Errors
    /// A size that the model can't have.
    pub fn macs(&self, sizes: &[(&str, usize)]) -> Result<Macs> {
        Ok(self.count(sizes)?.macs())
    }

    /// The multiply-accumulates of one forward by module.
    ///
    /// # Errors
    /// A size that the model can't have.
    pub fn count(&self, sizes: &[(&str, usize)]) -> Result<Count> {
        let size = |dim: &PortDim| match dim {
            PortDim::Fixed(n) => *n,
            PortDim::Named(name) => sizes.iter().find(|(n, _)| n == name).map_or(1, |(_, n)| *n),
        };
        let shape = |port: &Port| Shape::new(&port.dims.iter().map(size).collect::<Vec<_>>());
        let inputs = Inputs::new(self.inputs().iter().map(|port| (port.name.clone(), shape(port))));
        let mut count = Count::new();
        self.forward(&mut count, &inputs)?;
        Ok(count)
    }

    /// Mean share of the heads that a token uses, over all layers.
    pub fn active_share(&self) -> f64 {
        let (active, all) = self
            .layers()
            .iter()
            .fold((0, 0), |(active, all), layer| (active + layer.heads.active(), all + layer.heads.num_heads));
        active as f64 / all.max(1) as f64
    }
}

/// The model that `load` makes of a configuration without weights, and its tensors.
fn planned(config: &Config, load: impl Fn(&Checkpoint) -> Result<Model>) -> Result<(Model, Tensors)> {
    let tensors = match load(&Checkpoint::planned(config.clone(), &[])) {
        Err(Error::Tensors(mismatch)) => mismatch.problems,
        Err(error) => return Err(error),
        Ok(_) => Vec::new(),
    };
    let missing = |problem| match problem {
        Problem::Missing { tensor, expected } => Some((tensor, expected)),
        _ => None,
    };
    let tensors: Tensors = tensors.into_iter().filter_map(missing).collect();
    let sizes = tensors.iter().map(|(_, shape)| shape.iter().fold(1, |n: usize, &dim| n.saturating_mul(dim)));
    let parameters = sizes.fold(0, usize::saturating_add);
    if parameters > MAX_PARAMETERS {
        return Err(Error::TooLarge { file: config.path().to_owned(), parameters, limit: MAX_PARAMETERS });
    }
    Ok((load(&Checkpoint::planned(config.clone(), &tensors))?, tensors))
}
