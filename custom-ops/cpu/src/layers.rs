//! Parts of models that are no operators of ai.moh, for a host whose own are slow.

mod depthwise;

pub use depthwise::Depthwise;
