//! What happens to a recorded graph before it is encoded. A pass is one file and one line, its options included.

use crate::Target;
use crate::error::Error;
use crate::graph::Graph;
use moh_operators::{DOMAIN, Definition, DepthwiseConv, LayerNorm, Linear, LinearActivation};

/// A pass over a graph. Its fields are its options, on the command line too.
pub trait Pass: clap::Args {
    /// Whether the options can be used together with those of the other passes.
    ///
    /// # Errors
    /// [`Error`] saying which contradict each other.
    fn check(&self, _all: &Options) -> Result<(), Error> {
        Ok(())
    }

    /// Changes the graph.
    ///
    /// # Errors
    /// A node whose attributes its operator does not accept.
    fn run(&self, graph: &mut Graph) -> Result<(), Error>;
}

/// Declares the passes, in the order in which they run: a module and a type each.
macro_rules! passes {
    ($($module:ident::$pass:ident),+ $(,)?) => {
        $(mod $module;)+
        $(pub use $module::$pass;)+

        /// The passes with their options.
        #[derive(Debug, Clone, Default, clap::Args)]
        #[allow(missing_docs)]
        pub struct Options {
            $(#[command(flatten)] pub $module: $pass,)+
        }

        impl Options {
            /// Whether the options can be used together.
            ///
            /// # Errors
            /// [`Error`] saying which contradict each other.
            pub fn check(&self) -> Result<(), Error> {
                $(self.$module.check(self)?;)+
                Ok(())
            }
        }

        /// Runs every pass.
        ///
        /// # Errors
        /// A node whose attributes its operator does not accept.
        pub fn run(graph: &mut Graph, options: &Options) -> Result<(), Error> {
            $(options.$module.run(graph)?;)+
            Ok(())
        }
    };
}

passes! {
    heads::HeadLayers,
    attention_type::NarrowAttention,
    gates::ShowGates,
    dense::DenseLayers,
    norms::Norms,
    convolutions::Convolutions,
    bodies::WriteBodies,
    gemm::FlattenProducts,
    fold::FoldShapes,
    prune::Prune,
}

pub use attention_type::AttentionType;
pub use bodies::AttentionStyle;
pub use dense::DenseStyle;
pub use gates::Gates;
pub use heads::HeadStyle;

/// What has to be done before weights are quantised, because they are quantised as weights of the nodes that then use them. [`run`] finds
/// it done.
pub(crate) fn before_quantization(graph: &mut Graph, options: &Options) -> Result<(), Error> {
    options.heads.run(graph)
}

impl Options {
    /// What to know of styles of ours that were asked for, and not by the target, and that no node of the graphs has.
    pub(crate) fn notes(&self, graphs: &[&Graph], target: Option<Target>) -> Vec<String> {
        let row = target.map(Target::row);
        let styles = [
            ("--dense-layers", self.dense.style, row.map(|row| row.dense), &[Linear::NAME, LinearActivation::NAME][..]),
            ("--norms", self.norms.style, row.map(|row| row.norms), &[LayerNorm::NAME]),
            ("--convolutions", self.convolutions.style, row.map(|row| row.convolutions), &[DepthwiseConv::NAME]),
        ];
        let has = |operators: &[&str]| {
            let mut nodes = graphs.iter().flat_map(|graph| &graph.nodes);
            nodes.any(|node| node.domain == DOMAIN && operators.contains(&node.op_type))
        };
        let moh = Some(DenseStyle::Moh);
        let unused =
            styles.into_iter().filter(|(_, asked, usual, operators)| *asked == moh && *usual != moh && !has(operators));
        let note = |(option, .., operators): (&str, _, _, &[&str])| {
            format!(
                "{option} moh changed nothing: no part of this model can be written as ai.moh.{}",
                operators.join(" or ")
            )
        };
        unused.map(note).collect()
    }

    /// Says where the model is to run, whose styles are chosen where none is asked for, and whether all weights are to be used as the
    /// checkpoint stores them; and settles what follows from that and from other options.
    pub(crate) fn settle(&mut self, target: Option<Target>, as_stored: bool) {
        self.gemm.as_stored |= as_stored;
        let portable = self.bodies.attention == AttentionStyle::Portable;
        self.dense.standard |= as_stored || portable;
        let Some(row) = target.map(Target::row) else { return };
        self.heads.style.get_or_insert(row.heads);
        // A portable model has operators of ours nowhere.
        if !portable {
            self.dense.style.get_or_insert(row.dense);
            self.norms.style.get_or_insert(row.norms);
            self.convolutions.style.get_or_insert(row.convolutions);
        }
    }
}
