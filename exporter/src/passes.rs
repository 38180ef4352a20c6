//! What happens to a recorded graph before it is encoded. A pass is one file and one line, its options included.

use crate::error::Error;
use crate::graph::Graph;

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
    /// Says whether all weights are to be used as the checkpoint stores them, and settles what follows from that and from other options.
    pub(crate) fn settle(&mut self, as_stored: bool) {
        self.gemm.as_stored |= as_stored;
        let portable = self.bodies.attention == AttentionStyle::Portable;
        self.dense.standard |= as_stored || portable;
        if portable {
            self.norms.style = Some(DenseStyle::Onnx);
            self.convolutions.style = Some(DenseStyle::Onnx);
        }
    }
}
