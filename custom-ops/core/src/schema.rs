//! What the operators are: names, inputs, outputs, attributes and text. The only place.

use crate::error::Error;
use crate::function::{self, Body, Variant};
use crate::reference;
use crate::shape::{self, Dims, OutputDim};
use crate::tensor::{DType, Tensor};

/// The operators' ONNX domain.
pub const DOMAIN: &str = "ai.moh";

/// The version of [`DOMAIN`] that this library implements.
pub const VERSION: i64 = 1;

/// The element type of an input or output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementType {
    /// The operator's type parameter: one of [`DType::ALL`], the same for all of the node's T operands.
    T,
    /// Always float32.
    Float32,
}

/// An input or output.
#[derive(Debug)]
pub struct Operand {
    /// Formal name.
    pub name: &'static str,
    /// Element type.
    pub ty: ElementType,
    /// Whether a node may leave it out. Optional inputs come last, so that no node needs an empty name.
    pub optional: bool,
    /// Shape, for people.
    pub shape: &'static str,
    /// Meaning, for people.
    pub doc: &'static str,
}

/// The type of an attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttributeKind {
    /// A 64-bit integer.
    Int,
    /// A 32-bit float.
    Float,
    /// A list of 64-bit integers.
    Ints,
}

/// An attribute; every node carries every attribute.
#[derive(Debug)]
pub struct AttributeDef {
    /// Name.
    pub name: &'static str,
    /// Type.
    pub kind: AttributeKind,
    /// Meaning, for people.
    pub doc: &'static str,
}

/// An attribute's value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Of kind [`AttributeKind::Int`].
    Int(i64),
    /// Of kind [`AttributeKind::Float`].
    Float(f32),
    /// Of kind [`AttributeKind::Ints`].
    Ints(Vec<i64>),
}

impl Value {
    /// Its kind.
    pub fn kind(&self) -> AttributeKind {
        match self {
            Value::Int(_) => AttributeKind::Int,
            Value::Float(_) => AttributeKind::Float,
            Value::Ints(_) => AttributeKind::Ints,
        }
    }
}

/// An operator's attribute values, in the order of [`Operator::attributes`].
#[derive(Debug, Clone, PartialEq)]
pub struct Attributes {
    operator: &'static Operator,
    values: Vec<Value>,
}

impl Attributes {
    /// Reads every attribute of `operator` through `get`.
    ///
    /// # Errors
    /// [`Error::Attribute`] for one that `get` does not have, or whose type is another.
    pub fn read(
        operator: &'static Operator,
        mut get: impl FnMut(&'static AttributeDef) -> Option<Value>,
    ) -> Result<Attributes, Error> {
        let one = |def: &'static AttributeDef| match get(def) {
            Some(value) if value.kind() == def.kind => Ok(value),
            found => Err(Error::Attribute {
                operator: operator.name,
                attribute: def.name,
                expected: format!("{:?}", def.kind),
                found: found.map_or("nothing".to_owned(), |v| format!("{v:?}")),
            }),
        };
        Ok(Attributes { operator, values: operator.attributes.iter().map(one).collect::<Result<_, _>>()? })
    }

    /// The operator that they belong to.
    pub fn operator(&self) -> &'static Operator {
        self.operator
    }

    /// Definitions and values, in schema order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static AttributeDef, &Value)> + '_ {
        self.operator.attributes.iter().zip(&self.values)
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.iter().find(|(def, _)| def.name == name).map(|(_, value)| value)
    }

    /// An integer attribute; 0 for a name that the schema does not have.
    pub fn int(&self, name: &str) -> i64 {
        match self.get(name) {
            Some(Value::Int(v)) => *v,
            _ => 0,
        }
    }

    /// A float attribute; 0 for a name that the schema does not have.
    pub fn float(&self, name: &str) -> f32 {
        match self.get(name) {
            Some(Value::Float(v)) => *v,
            _ => 0.0,
        }
    }

    /// A list of integers; empty for a name that the schema does not have.
    pub fn ints(&self, name: &str) -> &[i64] {
        match self.get(name) {
            Some(Value::Ints(v)) => v,
            _ => &[],
        }
    }
}

/// Validates attributes and input shapes as far as they are known; gives the output's shape.
pub type Infer = fn(&Attributes, &[Option<&[Option<usize>]>]) -> Result<Vec<OutputDim>, Error>;

/// One operator of [`DOMAIN`]: its definition, and the functions that say what it means.
pub struct Operator {
    /// ONNX operator name.
    pub name: &'static str,
    /// Meaning, for people (Markdown).
    pub doc: &'static str,
    /// Inputs; optional ones last.
    pub inputs: &'static [Operand],
    /// The output.
    pub output: Operand,
    /// Attributes.
    pub attributes: &'static [AttributeDef],
    /// Rank of the second input in the layout that holds one matrix a head; 0 where there is none.
    pub per_head_rank: usize,
    /// Validates attributes and (partly known) input shapes; gives the output's shape.
    pub infer: Infer,
    /// The operator's body in standard ONNX operators.
    pub body: fn(Variant) -> Body,
    /// The f64 reference, on validated inputs.
    pub reference: fn(&Attributes, &[Option<Tensor<'_>>]) -> Vec<f64>,
}

impl std::fmt::Debug for Operator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Operator {
    fn eq(&self, other: &Operator) -> bool {
        self.name == other.name
    }
}

impl Operator {
    /// The number of inputs that every node has.
    pub fn required_inputs(&self) -> usize {
        self.inputs.iter().filter(|input| !input.optional).count()
    }

    /// The output's element type, where T is `t`.
    pub fn output_dtype(&self, t: DType) -> DType {
        match self.output.ty {
            ElementType::T => t,
            ElementType::Float32 => DType::F32,
        }
    }

    /// Validates fully known shapes and gives the output's.
    ///
    /// # Errors
    /// [`Error`] naming the attribute or input, what was expected and what was found.
    pub fn output_shape(&self, attributes: &Attributes, inputs: &[Option<&[usize]>]) -> Result<Dims, Error> {
        shape::output_shape(self, attributes, inputs)
    }

    /// Validates whole tensors: number, element types, shapes and lengths; gives T and the output's shape.
    ///
    /// # Errors
    /// [`Error`] naming the input, what was expected and what was found.
    pub fn validate(&self, attributes: &Attributes, inputs: &[Option<Tensor<'_>>]) -> Result<(DType, Dims), Error> {
        shape::validate(self, attributes, inputs)
    }
}

/// Every operator of [`DOMAIN`].
pub static OPERATORS: &[&Operator] =
    &[&ROUTED_ATTENTION, &ROUTED_PROJECTION, &ROUTED_COMBINE, &ROUTED_MLP, &ROUTED_AGGREGATED_ATTENTION, &TOP_K_ROUTER];

/// The operator of that name.
pub fn operator(name: &str) -> Option<&'static Operator> {
    OPERATORS.iter().copied().find(|operator| operator.name == name)
}

const fn input(name: &'static str, ty: ElementType, shape: &'static str, doc: &'static str) -> Operand {
    Operand { name, ty, optional: false, shape, doc }
}

const fn optional(name: &'static str, shape: &'static str, doc: &'static str) -> Operand {
    Operand { name, ty: ElementType::T, optional: true, shape, doc }
}

const fn int(name: &'static str, doc: &'static str) -> AttributeDef {
    AttributeDef { name, kind: AttributeKind::Int, doc }
}

const fn float(name: &'static str, doc: &'static str) -> AttributeDef {
    AttributeDef { name, kind: AttributeKind::Float, doc }
}

/// Multi-head attention in which every token uses only the heads whose gate is not zero.
pub static ROUTED_ATTENTION: Operator = Operator {
    name: "RoutedAttention",
    doc: "Scaled dot-product attention whose heads are gated per query token: per head, \
          `gate * softmax(scale * q.k + bias) v`. Query head `h` reads key/value head `h / (num_heads / kv_num_heads)`. \
          A gate of exactly 0 means that the token does not use the head: it is not computed, and its block of the output \
          is exactly 0 whatever the inputs hold. A row whose keys are all masked gives 0. Scores and sums are accumulated in float32.",
    inputs: &[
        input("query", ElementType::T, "(batch, q_len, num_heads * head_dim)", "Queries."),
        input(
            "key",
            ElementType::T,
            "(batch, kv_len, kv_num_heads * head_dim) or (batch, kv_num_heads, kv_len, head_dim)",
            "Keys. Rank 4 is the layout of a KV cache, read in place; key and value have the same rank.",
        ),
        input(
            "value",
            ElementType::T,
            "(batch, kv_len, kv_num_heads * value_dim) or (batch, kv_num_heads, kv_len, value_dim)",
            "Values.",
        ),
        input(
            "head_gates",
            ElementType::Float32,
            "(batch, q_len, num_heads)",
            "Any finite number; 0 switches the head off.",
        ),
        Operand {
            name: "attn_bias",
            ty: ElementType::T,
            optional: true,
            shape: "broadcastable to (batch, num_heads, q_len, kv_len)",
            doc: "Added to the scaled scores; -inf masks.",
        },
    ],
    output: Operand {
        name: "output",
        ty: ElementType::T,
        optional: false,
        shape: "(batch, q_len, num_heads * value_dim)",
        doc: "The heads' outputs, side by side.",
    },
    attributes: &[
        int("num_heads", "Query heads."),
        int("kv_num_heads", "Key and value heads; divides num_heads."),
        float("scale", "Factor of the scores: the number itself, usually 1/sqrt(head_dim)."),
        int("is_causal", "1: query i sees keys j <= i + (kv_len - q_len). 0: all keys."),
    ],
    per_head_rank: 4,
    infer: shape::routed_attention::infer,
    body: function::routed_attention::body,
    reference: reference::routed_attention::reference,
};

const WEIGHT_LAYOUT: AttributeDef = int(
    "weight_layout",
    "0: the weight is one matrix, (out, in) as nn.Linear stores it. 1: one matrix a head, (num_heads, in, out).",
);

/// The linear layer that makes the heads' queries, for the heads that are on.
pub static ROUTED_PROJECTION: Operator = Operator {
    name: "RoutedProjection",
    doc: "`x W^T + bias` in the blocks of the heads that are on; the block of a head whose gate is 0 is not computed and is \
          exactly 0, whatever the inputs hold. The gates are only a mask here.",
    inputs: &[
        input("x", ElementType::T, "(batch, q_len, width)", "The tokens."),
        input(
            "weight",
            ElementType::T,
            "(num_heads * head_dim, width), or (num_heads, width, head_dim) in layout 1",
            "The heads' matrices.",
        ),
        input(
            "head_gates",
            ElementType::Float32,
            "(batch, q_len, num_heads)",
            "Any finite number; 0 switches the head off.",
        ),
        optional("bias", "(num_heads * head_dim)", "Added where the head is on."),
    ],
    output: input("output", ElementType::T, "(batch, q_len, num_heads * head_dim)", "The heads' blocks, side by side."),
    attributes: &[int("num_heads", "Heads."), WEIGHT_LAYOUT],
    per_head_rank: 3,
    infer: shape::routed_linear::infer_projection,
    body: function::routed_linear::projection,
    reference: reference::routed_linear::projection,
};

/// The linear layer that combines the heads' outputs, for the heads that are on.
pub static ROUTED_COMBINE: Operator = Operator {
    name: "RoutedCombine",
    doc: "The sum of `x_h W_h^T` over the heads that are on, plus the bias once. The block of x of a head whose gate is 0 is not \
          read: it counts as 0, whatever it holds. The gates are only a mask here.",
    inputs: &[
        input("x", ElementType::T, "(batch, q_len, num_heads * value_dim)", "The heads' blocks, side by side."),
        input(
            "weight",
            ElementType::T,
            "(width, num_heads * value_dim), or (num_heads, value_dim, width) in layout 1",
            "The heads' matrices.",
        ),
        input(
            "head_gates",
            ElementType::Float32,
            "(batch, q_len, num_heads)",
            "Any finite number; 0 switches the head off.",
        ),
        optional("bias", "(width)", "Added once."),
    ],
    output: input("output", ElementType::T, "(batch, q_len, width)", "The tokens."),
    attributes: &[int("num_heads", "Heads."), WEIGHT_LAYOUT],
    per_head_rank: 3,
    infer: shape::routed_linear::infer_combine,
    body: function::routed_linear::combine,
    reference: reference::routed_linear::combine,
};

/// A mixture of feed-forward experts.
pub static ROUTED_MLP: Operator = Operator {
    name: "RoutedMLP",
    doc: "The sum of `gate * (act(x W1 + b1) W2 + b2)` over the experts whose gate is not 0; the others are not computed and add \
          exactly 0, whatever the inputs hold. A token without experts gives 0.",
    inputs: &[
        input("x", ElementType::T, "(batch, q_len, width)", "The tokens."),
        input(
            "fc1_weight",
            ElementType::T,
            "(num_experts, width, hidden), or (num_experts, width, 2 * hidden) for SwiGLU",
            "First matrices, as x W; for SwiGLU the gate's columns and then the others.",
        ),
        input("fc2_weight", ElementType::T, "(num_experts, hidden, out_width)", "Second matrices."),
        input(
            "expert_gates",
            ElementType::Float32,
            "(batch, q_len, num_experts)",
            "Factors; 0 switches the expert off.",
        ),
        optional("fc1_bias", "(num_experts, columns of fc1_weight)", "Comes with fc2_bias or not at all."),
        optional("fc2_bias", "(num_experts, out_width)", "Comes with fc1_bias or not at all."),
    ],
    output: input("output", ElementType::T, "(batch, q_len, out_width)", "The tokens."),
    attributes: &[
        int("num_experts", "Experts."),
        int("activation", "0: ReLU. 1: GELU (erf). 2: GELU (tanh). 3: SiLU. 4: SwiGLU, silu(gate) * other."),
    ],
    per_head_rank: 0,
    infer: shape::routed_mlp::infer,
    body: function::routed_mlp::body,
    reference: reference::routed_mlp::reference,
};

/// TransNeXt's attention to a window and to pooled tokens, with gated heads.
pub static ROUTED_AGGREGATED_ATTENTION: Operator = Operator {
    name: "RoutedAggregatedAttention",
    doc: "Aggregated attention (TransNeXt, arXiv 2311.17132) of the tokens of a grid, row by row, each to the cells of its window \
          and to pooled tokens, whose heads are gated per query token. Per head, with `unit(z) = z / max(|z|, 1e-12)` and \
          `q = unit(query)`: scores `s = (q + query_embedding) * query_scale`, \
          `local_j = s . unit(key_j) + local_bias_j` for the window's cells j inside the grid, row by row, and \
          `pooled_m = s . unit(pooled_key_m) + pooled_bias_m`; weights `a = softmax` over both; \
          `gate * (sum_j (a_j + q . learnable_tokens_j + learnable_bias_j) value_j + sum_m a_m pooled_value_m)`. \
          A gate of exactly 0 means that the token does not use the head: it is not computed, and its block of the output \
          is exactly 0 whatever the inputs hold. Norms, scores and sums are accumulated in float32.",
    inputs: &[
        input("query", ElementType::T, "(batch, height * width, num_heads * head_dim)", "Queries, as projected."),
        input("key", ElementType::T, "(batch, height * width, num_heads * head_dim)", "Keys, as projected."),
        input("value", ElementType::T, "(batch, height * width, num_heads * head_dim)", "Values."),
        input("pooled_key", ElementType::T, "(batch, pooled, num_heads * head_dim)", "Keys of the pooled tokens."),
        input("pooled_value", ElementType::T, "(batch, pooled, num_heads * head_dim)", "Values of the pooled tokens."),
        input(
            "head_gates",
            ElementType::Float32,
            "(batch, height * width, num_heads)",
            "Any finite number; 0 switches the head off.",
        ),
        input("query_embedding", ElementType::T, "(num_heads, head_dim)", "Added to the normalised queries."),
        input(
            "query_scale",
            ElementType::Float32,
            "(height * width, num_heads)",
            "Factor of the scores: softplus(temperature) * ln(window cells inside the grid + pooled).",
        ),
        input("local_bias", ElementType::T, "(num_heads, window * window)", "Added to the scores of the window."),
        input(
            "pooled_bias",
            ElementType::T,
            "(num_heads, height * width, pooled)",
            "Added to the scores of the pooled tokens.",
        ),
        input(
            "learnable_tokens",
            ElementType::T,
            "(num_heads, head_dim, window * window)",
            "Their products with the normalised queries are added to the weights of the window.",
        ),
        input("learnable_bias", ElementType::T, "(num_heads, window * window)", "Added to the weights of the window."),
    ],
    output: input(
        "output",
        ElementType::T,
        "(batch, height * width, num_heads * head_dim)",
        "The heads' outputs, side by side.",
    ),
    attributes: &[
        int("num_heads", "Heads."),
        int("height", "Rows of the grid."),
        int("width", "Columns of the grid."),
        int("window", "Side of the window around each token: an odd number."),
    ],
    per_head_rank: 0,
    infer: shape::aggregated_attention::infer,
    body: function::aggregated_attention::body,
    reference: reference::aggregated_attention::reference,
};

/// The router: which heads (or experts) every token uses, and how much.
pub static TOP_K_ROUTER: Operator = Operator {
    name: "TopKRouter",
    doc: "The gates of the heads (or experts) of every token: those of `shared_heads` are on for all tokens, and of the others, \
          the routed ones, exactly the `top_k` with the largest scores, the first among equals. A score that is NaN counts as -inf. \
          All other gates are exactly 0. With R routed and S shared heads, both in ascending order, `scores` holds, one after the \
          other, in kind 0 (MoH, arXiv 2410.11842, equations 5 to 7): R scores of the routed heads if top_k > 0, 2 of the \
          balance if top_k > 0 and S > 0, S of the shared heads if S > 1. Gates of the routed part are \
          `top_k * softmax` over the selected scores, those of the shared part `S * softmax` over all of theirs; where there are \
          both parts, the shared one is multiplied by `2 b_0` and the routed one by `2 b_1`, with b the softmax of the balance. \
          In kinds 1 and 2 (MoA, arXiv 2210.05144), without shared heads: a score a head; the gate of a selected one is its softmax \
          over all heads (kind 1) or over the selected ones (kind 2). In kind 3 (MoH-LLaMA): queries, head by head, whose squared norm is \
          the score; gates are 0 and 1. Everything is computed in float32. Where a softmax \
          is over NaN, +inf or nothing but -inf, all of its gates are NaN, and its heads count as on; a score far below the largest \
          one (by 87 and more) may round to a gate of 0.",
    inputs: &[input(
        "scores",
        ElementType::T,
        "(batch, q_len, width)",
        "Scores, of the width that kind and head counts ask for; in kind 3 queries, (batch, q_len, num_heads * head_dim).",
    )],
    output: input("head_gates", ElementType::Float32, "(batch, q_len, num_heads)", "The gates."),
    attributes: &[
        int("kind", "0: MoH's two stages. 1: softmax over all. 2: softmax over the selected. 3: norms of queries."),
        int("num_heads", "Heads, or experts."),
        int("top_k", "Routed heads that a token uses; 0 only in kinds 0 and 3, beside shared heads."),
        AttributeDef {
            name: "shared_heads",
            kind: AttributeKind::Ints,
            doc: "Heads that every token uses, ascending; kinds 0 and 3 alone have any.",
        },
    ],
    per_head_rank: 0,
    infer: shape::top_k_router::infer,
    body: function::top_k_router::body,
    reference: reference::top_k_router::reference,
};

/// The reference page of all operators, in Markdown: `docs/operators.md` holds this text.
pub fn markdown() -> String {
    let mut page = format!(
        "# Operators of `{DOMAIN}`, version {VERSION}\n\nGenerated from `custom-ops/core/src/schema.rs`. \
         T is one of {}.\n",
        DType::ALL.map(|t| t.to_string()).join(", ")
    );
    for operator in OPERATORS {
        page +=
            &format!("\n## {}\n\n{}\n\n| input | type | shape | |\n|---|---|---|---|\n", operator.name, operator.doc);
        for operand in operator.inputs.iter().chain([&operator.output]) {
            let role = if std::ptr::eq(operand, &operator.output) { " (output)" } else { "" };
            let optional = if operand.optional { " (optional)" } else { "" };
            let ty = match operand.ty {
                ElementType::T => "T",
                ElementType::Float32 => "float32",
            };
            page += &format!("| {}{role}{optional} | {ty} | {} | {} |\n", operand.name, operand.shape, operand.doc);
        }
        page += "\n| attribute | type | |\n|---|---|---|\n";
        for attribute in operator.attributes {
            page += &format!("| {} | {:?} | {} |\n", attribute.name, attribute.kind, attribute.doc);
        }
    }
    page
}
