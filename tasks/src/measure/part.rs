//! What a node of an exported model is for: read from its name, which holds the path of its module, and its operator.

use moh_operators::{self as operators, OPERATORS, Operator};

/// How onnxruntime begins the names of an inlined function's nodes.
const INLINED: &str = "_inlfunc_";

/// Whose kernel runs a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// One of the ai.moh kernels.
    Moh,
    /// A kernel of the runtime, for a node of an ai.moh operator's body.
    Body,
    /// A kernel of the runtime.
    Runtime,
}

impl Kernel {
    /// Every kind.
    pub const ALL: &'static [Kernel] = &[Kernel::Moh, Kernel::Body, Kernel::Runtime];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Moh => "ai.moh",
            Kernel::Body => "body",
            Kernel::Runtime => "runtime",
        }
    }

    /// Of a node.
    pub(super) fn of(name: &str, op_type: &str) -> Kernel {
        match (operators::operator(op_type).is_some(), body_of(name)) {
            (true, _) => Kernel::Moh,
            (false, Some(_)) => Kernel::Body,
            (false, None) => Kernel::Runtime,
        }
    }
}

/// What a node is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Scores, softmax and values.
    Attention,
    /// The linear layers of attention modules.
    Projections,
    /// What selects heads and computes their gates.
    Router,
    /// What else is in attention modules: rotations, caches, copies.
    Around,
    /// Feed-forward layers.
    Mlp,
    /// Normalisation.
    Norms,
    /// Everything else: embeddings, residuals, modulation, logits.
    Rest,
}

impl Part {
    /// Every part.
    pub const ALL: &'static [Part] =
        &[Part::Attention, Part::Projections, Part::Router, Part::Around, Part::Mlp, Part::Norms, Part::Rest];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Part::Attention => "attention",
            Part::Projections => "projections",
            Part::Router => "router",
            Part::Around => "around attention",
            Part::Mlp => "feed-forward",
            Part::Norms => "norms",
            Part::Rest => "rest",
        }
    }

    /// Of a node.
    pub(super) fn of(name: &str, op_type: &str) -> Part {
        let operator = operators::operator(op_type).or_else(|| body_of(name));
        if let Some(part) = operator.and_then(|operator| Part::of_operator(operator.part)) {
            return part;
        }
        let (path, node) = name.split_once('/').unwrap_or((name, ""));
        let modules: Vec<&str> = path.split('.').collect();
        let last = modules.last().copied().unwrap_or_default();
        let attention = modules.iter().position(|module| module.ends_with("attn"));
        match attention {
            _ if last.contains("norm") || op_type.contains("Norm") => Part::Norms,
            Some(_) if last.starts_with("wg") || last.contains("gate") || last == "router" => Part::Router,
            Some(at) if at + 1 < modules.len() => Part::Projections,
            // Gates of layers whose tokens have no choice.
            Some(_) if node.starts_with("ConstantOfShape") || node.starts_with("Softmax") => Part::Router,
            Some(_) => Part::Around,
            None if modules.iter().any(|module| ["mlp", "ffd", "fc1", "fc2"].contains(module)) => Part::Mlp,
            None => Part::Rest,
        }
    }

    /// `None` for an operator of which the node's name decides.
    fn of_operator(part: operators::Part) -> Option<Part> {
        match part {
            operators::Part::Attention => Some(Part::Attention),
            operators::Part::Projections => Some(Part::Projections),
            operators::Part::Router => Some(Part::Router),
            operators::Part::Mlp => Some(Part::Mlp),
            operators::Part::Norms => Some(Part::Norms),
            operators::Part::Dense => None,
        }
    }
}

/// The operator whose body a node is of: inlined by onnxruntime, or by the exporter.
fn body_of(name: &str) -> Option<&'static Operator> {
    let inside = |operator: &str| {
        let inlined = name.strip_prefix(INLINED).and_then(|rest| rest.strip_prefix(operator));
        inlined.is_some_and(|rest| rest.starts_with('_')) || name.contains(&format!("/{operator}/"))
    };
    OPERATORS.iter().copied().find(|operator| inside(operator.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_nodes_are_for() {
        for (name, op_type, kernel, part) in [
            ("blocks.0.attn/RoutedAttention", "RoutedAttention", Kernel::Moh, Part::Attention),
            ("block1.0.attn/RoutedAggregatedAttention", "RoutedAggregatedAttention", Kernel::Moh, Part::Attention),
            ("blocks.0.attn.qkv/RoutedProjection", "RoutedProjection", Kernel::Moh, Part::Projections),
            ("_inlfunc_RoutedCombine_token_3_sum", "MatMul", Kernel::Body, Part::Projections),
            ("_inlfunc_RoutedAttention_weights", "Softmax", Kernel::Body, Part::Attention),
            ("model.layers.0.self_attn/RoutedAttention/weights", "Softmax", Kernel::Body, Part::Attention),
            ("blocks.1.attn.qkv/MatMul", "MatMul", Kernel::Runtime, Part::Projections),
            ("blocks.1.attn.qkv/Add.split-over-2.0..96.prefused", "OptMatMul", Kernel::Runtime, Part::Projections),
            ("blocks.1.attn.wg_0/MatMul", "MatMul", Kernel::Runtime, Part::Router),
            ("blocks.1.attn/TopKRouter", "TopKRouter", Kernel::Moh, Part::Router),
            ("_inlfunc_TopKRouter_shared_weights", "Softmax", Kernel::Body, Part::Router),
            ("blocks.1.attn/TopKRouter/selected", "TopK", Kernel::Body, Part::Router),
            ("blocks.1.attn/ConstantOfShape", "ConstantOfShape", Kernel::Runtime, Part::Router),
            ("model.layers.0.self_attn/Slice_4/GatherSliceToSplitFusion", "Split", Kernel::Runtime, Part::Around),
            ("model.layers.0.self_attn/Concat", "Concat", Kernel::Runtime, Part::Around),
            ("block1.0.attn.norm/LayerNormalization", "LayerNormalization", Kernel::Runtime, Part::Norms),
            ("model.layers.3.input_layernorm/Pow", "Pow", Kernel::Runtime, Part::Norms),
            ("blocks.1/LayerNormalization", "LayerNormalization", Kernel::Runtime, Part::Norms),
            ("blocks.1/LayerNormalization", "LayerNorm", Kernel::Moh, Part::Norms),
            ("_inlfunc_LayerNorm_scaled", "Mul", Kernel::Body, Part::Norms),
            ("model.layers.2.mlp.down_proj/MatMul", "MatMul", Kernel::Runtime, Part::Mlp),
            ("decoder.layers.2.fc1/MatMul", "MatMul", Kernel::Runtime, Part::Mlp),
            ("blocks.1/Mul_3", "Mul", Kernel::Runtime, Part::Rest),
            ("lm_head/MatMul", "MatMul", Kernel::Runtime, Part::Rest),
            ("model.layers.2.mlp.down_proj/MatMul", "LinearNBits", Kernel::Moh, Part::Mlp),
            ("model.layers.2.self_attn.v_proj/MatMul", "LinearNBits", Kernel::Moh, Part::Projections),
            ("lm_head/MatMul", "LinearNBits", Kernel::Moh, Part::Rest),
        ] {
            assert_eq!((Kernel::of(name, op_type), Part::of(name, op_type)), (kernel, part), "{name}");
        }
    }
}
