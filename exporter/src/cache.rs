//! How a language model's key-value cache grows, which its family reads from the configuration.

use crate::error::Error;
use crate::proto::{GraphProto, NodeProto};
use crate::{AttentionStyle, Options};
use moh_models::{Checkpoint, Model};
use moh_operators::{CacheUpdate, DOMAIN, Definition};
use moh_runtime::names;
use serde::Serialize;

/// How the cache grows from call to call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// Every call gives a new cache, longer by the new tokens.
    Concat,
    /// A cache with room for more tokens, and a length for each sequence: where past and present are the same memory, only the
    /// new tokens are written.
    InPlace,
}

/// The configuration's key.
const KEY: &str = "cache";

impl Cache {
    /// Chooses it for the models that have a choice.
    pub fn put(self, checkpoint: &mut Checkpoint) {
        checkpoint.configure(KEY, if self == Cache::InPlace { "in-place" } else { "concat" });
    }

    /// What a graph was written with.
    pub(crate) fn of_graph(graph: &GraphProto) -> Cache {
        let updates = |node: &NodeProto| node.domain() == DOMAIN && node.op_type() == CacheUpdate::NAME;
        if graph.node.iter().any(updates) { Cache::InPlace } else { Cache::Concat }
    }

    /// What the options ask for, or else what suits their target; `None`: what the configuration says.
    pub(crate) fn of_options(options: &Options) -> Option<Cache> {
        let usual = options.target.map(|target| target.row().cache);
        options.cache.or(if is_portable(options) { usual.map(|_| Cache::Concat) } else { usual })
    }

    /// Refuses a cache in place for a model that has none, and one written as standard operators.
    ///
    /// # Errors
    /// [`Error::Cache`] or [`Error::PortableCache`].
    pub(crate) fn check(options: &Options, model: &Model) -> Result<(), Error> {
        match in_place(model) {
            false if options.cache == Some(Cache::InPlace) => Err(Error::Cache { family: model.family().to_owned() }),
            // tract cannot scatter by sizes that are sums and differences of symbols.
            true if is_portable(options) => Err(Error::PortableCache),
            _ => Ok(()),
        }
    }
}

fn is_portable(options: &Options) -> bool {
    options.passes.bodies.attention == AttentionStyle::Portable
}

/// Whether the model's cache is a buffer with room for more tokens than there are.
pub(crate) fn in_place(model: &Model) -> bool {
    model.outputs().iter().any(|port| port.dims.contains(&moh_models::families::PortDim::Named("capacity")))
}

/// How the model's cache grows, where it has one that could grow otherwise.
pub(crate) fn of_model(model: &Model) -> Option<Cache> {
    let grows = |port: &moh_models::families::Port| {
        port.dims.contains(&moh_models::families::PortDim::Named("past+sequence"))
            && port.name.starts_with(names::PRESENT)
    };
    match () {
        () if in_place(model) => Some(Cache::InPlace),
        () => model.outputs().iter().any(grows).then_some(Cache::Concat),
    }
}
