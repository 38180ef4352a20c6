//! The two attentions of TransNeXt, gated: full in the last stage, aggregated before.

use super::Shape;
use super::constants::{BiasMlp, Grid, bias_table, scaled_softplus, softplus};
use crate::checkpoint::{Loader, Weight};
use crate::error::Error;
use crate::layers::HeadLinear;
use crate::ops::{Argument, Binary, Linear, Ops, Reduce, Result, Tap, Type, Unary};
use crate::router::{Router, load_linear};
use candle_core::Tensor;
use moh_operators::{RoutedAggregatedAttention, RoutedAttention, aggregated_attention, routed_attention};
use std::sync::Arc;

/// An attention module.
pub(super) struct Module {
    pub(super) router: Router,
    pub(super) kind: Kind,
    query: HeadLinear,
    key: Linear,
    value: Linear,
    proj: HeadLinear,
}

/// What a module attends to. Constants are folded once the whole checkpoint is known to be right.
pub(super) enum Kind {
    /// Every token.
    Full {
        /// (num_heads, head_dim).
        query_embedding: Weight,
        /// Factor of a head's queries, (num_heads, 1).
        query_scale: Weight,
        /// (1, num_heads, N, N).
        bias: Weight,
    },
    /// A window and pooled tokens.
    Aggregated {
        /// 1x1 convolution before the pooling.
        reduction: Linear,
        /// LayerNorm after it.
        norm: (Weight, Weight),
        norm_eps: f32,
        grid: Grid,
        constants: Box<Aggregation>,
    },
}

/// The constants of aggregated attention, for a grid of N = height * width tokens.
pub(super) struct Aggregation {
    attributes: aggregated_attention::Attributes,
    /// (num_heads, head_dim).
    query_embedding: Weight,
    /// (N, num_heads).
    query_scale: Weight,
    /// (num_heads, window^2).
    local_bias: Weight,
    /// (num_heads, N, pooled tokens).
    pooled_bias: Weight,
    /// (num_heads, head_dim, window^2).
    learnable_tokens: Weight,
    /// (num_heads, window^2).
    learnable_bias: Weight,
}

/// A module's tensors, before the constants are folded.
pub(super) struct Raw {
    path: String,
    router: Router,
    query: HeadLinear,
    key: Linear,
    value: Linear,
    proj: HeadLinear,
    temperature: Weight,
    query_embedding: Weight,
    bias: [Weight; 4],
    aggregation: Option<RawAggregation>,
}

struct RawAggregation {
    reduction: Linear,
    norm: (Weight, Weight),
    local_bias: Weight,
    learnable_tokens: Weight,
    learnable_bias: Weight,
}

impl Raw {
    pub(super) fn load(l: &mut Loader<'_>, path: &str, shape: &Shape, router: Router) -> Raw {
        let (width, heads, dim) = (shape.width, shape.heads.num_heads, shape.head_dim());
        let name = |part: &str| format!("{path}.{part}");
        let (query, key_value) = match shape.window {
            Some(_) => (
                load_linear(l, &name("q"), width, width, shape.qkv_bias),
                load_linear(l, &name("kv"), 2 * width, width, shape.qkv_bias),
            ),
            None => {
                let qkv = load_linear(l, &name("qkv"), 3 * width, width, shape.qkv_bias);
                (qkv.rows(0..width), qkv.rows(width..3 * width))
            }
        };
        let (key, value) = (key_value.rows(0..width), key_value.rows(width..2 * width));
        let aggregation = shape.window.map(|window| {
            let cells = window * window;
            RawAggregation {
                reduction: Linear {
                    weight: l.weight(&name("sr.weight"), &[width, width, 1, 1]).reshaped([width, width]),
                    bias: Some(l.weight(&name("sr.bias"), &[width])),
                },
                norm: (l.weight(&name("norm.weight"), &[width]), l.weight(&name("norm.bias"), &[width])),
                local_bias: l.weight(&name("relative_pos_bias_local"), &[heads, cells]),
                learnable_tokens: l.weight(&name("learnable_tokens"), &[heads, dim, cells]),
                learnable_bias: l.weight(&name("learnable_bias"), &[heads, 1, cells]).reshaped([heads, cells]),
            }
        });
        Raw {
            path: path.to_owned(),
            router,
            query: query.over_heads(heads),
            key,
            value,
            proj: load_linear(l, &name("proj"), width, width, true).over_heads(heads),
            temperature: l.weight(&name("temperature"), &[heads, 1, 1]),
            query_embedding: l.weight(&name("query_embedding"), &[heads, 1, dim]).reshaped([heads, dim]),
            bias: [
                l.weight(&name("cpb_fc1.weight"), &[shape.bias_hidden, 2]),
                l.weight(&name("cpb_fc1.bias"), &[shape.bias_hidden]),
                l.weight(&name("cpb_fc2.weight"), &[heads, shape.bias_hidden]),
                l.weight(&name("cpb_fc2.bias"), &[heads]),
            ],
            aggregation,
        }
    }

    /// Computes what does not depend on the input.
    ///
    /// # Errors
    /// [`crate::Error::NotFinite`] for a weight that the exporter will not see.
    pub(super) fn fold(self, shape: &Shape) -> Result<Module> {
        self.bias.iter().chain([&self.temperature]).try_for_each(Weight::check_finite)?;
        // A model that is only planned has no numbers, and may be of any size.
        let planned = self.bias.iter().any(Weight::is_absent);
        let pretrained = shape.pretrained;
        let table = |name: String, shape: Vec<usize>, grid: Grid, values: &dyn Fn() -> Vec<f32>| {
            let table = match planned {
                true => Weight::absent(&name, &shape),
                false => Weight::from_f32(name, shape, values()),
            };
            table.derived(self.bias.to_vec(), Arc::new(move |mlp: &[Tensor]| bias_table(mlp, grid, pretrained)))
        };
        let constant = |name: &str, shape: &[usize], factors: Vec<f32>, values| {
            Weight::from_f32(format!("{}.{name}", self.path), shape.to_vec(), values).derived(
                vec![self.temperature.clone()],
                Arc::new(move |temperature: &[Tensor]| match temperature {
                    [temperature] => scaled_softplus(temperature, &factors),
                    _ => Err(Error::Internal("one temperature")),
                }),
            )
        };
        let [fc1_weight, fc1_bias, fc2_weight, fc2_bias] = &self.bias;
        let mlp = BiasMlp {
            fc1_weight: fc1_weight.to_f32()?,
            fc1_bias: fc1_bias.to_f32()?,
            fc2_weight: fc2_weight.to_f32()?,
            fc2_bias: fc2_bias.to_f32()?,
        };
        let temperatures: Vec<f32> = self.temperature.to_f32()?.into_iter().map(softplus).collect();
        let (heads, tokens) = (shape.heads.num_heads, shape.side * shape.side);
        let kind = match (self.aggregation, shape.window) {
            (Some(raw), Some(window)) => {
                let grid = Grid { side: shape.side, pooled: shape.pooled };
                let pooled = grid.pooled * grid.pooled;
                let lengths: Vec<f32> =
                    grid.window_cells(window).into_iter().map(|cells| ((cells + pooled) as f32).ln()).collect();
                let scales =
                    lengths.iter().flat_map(|length| temperatures.iter().map(move |tau| tau * length)).collect();
                let constants = Aggregation {
                    attributes: aggregated_attention::Attributes {
                        num_heads: heads,
                        height: grid.side,
                        width: grid.side,
                        window,
                    },
                    query_embedding: self.query_embedding,
                    query_scale: constant("query_scale", &[tokens, heads], lengths, scales),
                    local_bias: raw.local_bias,
                    pooled_bias: table(
                        format!("{}.pooled_bias", self.path),
                        vec![heads, tokens, pooled],
                        grid,
                        &|| mlp.table(grid, shape.pretrained),
                    ),
                    learnable_tokens: raw.learnable_tokens,
                    learnable_bias: raw.learnable_bias,
                };
                Kind::Aggregated {
                    reduction: raw.reduction,
                    norm: raw.norm,
                    norm_eps: shape.pool_norm_eps,
                    grid,
                    constants: Box::new(constants),
                }
            }
            _ => {
                let grid = Grid { side: shape.side, pooled: shape.side };
                Kind::Full {
                    query_embedding: self.query_embedding,
                    query_scale: constant("query_scale", &[heads, 1], vec![(tokens as f32).ln()], {
                        temperatures.iter().map(|tau| tau * (tokens as f32).ln()).collect()
                    }),
                    bias: table(format!("{}.bias", self.path), vec![1, heads, tokens, tokens], grid, &|| {
                        mlp.table(grid, shape.pretrained)
                    }),
                }
            }
        };
        let Raw { router, query, key, value, proj, .. } = self;
        Ok(Module { router, kind, query, key, value, proj })
    }
}

/// x / max(|x|, 1e-12) over the last axis, in float32: f16 has no 1e-12.
fn unit<O: Ops>(ops: &mut O, x: &O::Value) -> Result<O::Value> {
    let squares = ops.mul(x, x)?;
    let sum = ops.reduce(Reduce::Sum, &squares, &[-1])?;
    let norm = ops.unary(Unary::Sqrt, &sum)?;
    let least = ops.scalar(Type::F32, 1e-12)?;
    let norm = ops.binary(Binary::Max, &norm, &least)?;
    ops.binary(Binary::Div, x, &norm)
}

impl Module {
    pub(super) fn forward<O: Ops>(&self, ops: &mut O, x: &O::Value) -> Result<O::Value> {
        ops.tap(Tap::AttentionInput, x)?;
        let gates = self.router.forward(ops, x)?;
        let query = self.query.project(ops, x, &gates)?;
        let heads = match &self.kind {
            Kind::Full { query_embedding, query_scale, bias } => {
                self.full(ops, x, &query, &gates, (query_embedding, query_scale, bias))?
            }
            Kind::Aggregated { reduction, norm, norm_eps, grid, constants } => {
                let (key, value) = self.keys_and_values(ops, x)?;
                let pooled = ops.linear(x, reduction)?;
                let pooled = ops.unary(Unary::Gelu, &pooled)?;
                let pooled = pool(ops, &pooled, *grid, self.width())?;
                let pooled = ops.layer_norm(&pooled, self.width(), Some((&norm.0, &norm.1)), *norm_eps)?;
                let (pooled_key, pooled_value) = self.keys_and_values(ops, &pooled)?;
                let inputs = aggregated_attention::Inputs {
                    query: Argument::Value(&query),
                    key: Argument::Value(&key),
                    value: Argument::Value(&value),
                    pooled_key: Argument::Value(&pooled_key),
                    pooled_value: Argument::Value(&pooled_value),
                    head_gates: Argument::Value(&gates),
                    query_embedding: Argument::Weight(&constants.query_embedding),
                    query_scale: Argument::Weight(&constants.query_scale),
                    local_bias: Argument::Weight(&constants.local_bias),
                    pooled_bias: Argument::Weight(&constants.pooled_bias),
                    learnable_tokens: Argument::Weight(&constants.learnable_tokens),
                    learnable_bias: Argument::Weight(&constants.learnable_bias),
                };
                ops.operator::<RoutedAggregatedAttention>(constants.attributes, &inputs)?
            }
        };
        let y = self.proj.combine(ops, &heads, &gates)?;
        ops.tap(Tap::AttentionOutput, &y)?;
        Ok(y)
    }

    fn width(&self) -> usize {
        self.query.weight.shape()[0]
    }

    fn keys_and_values<O: Ops>(&self, ops: &mut O, x: &O::Value) -> Result<(O::Value, O::Value)> {
        Ok((ops.linear(x, &self.key)?, ops.linear(x, &self.value)?))
    }

    fn full<O: Ops>(
        &self,
        ops: &mut O,
        x: &O::Value,
        query: &O::Value,
        gates: &O::Value,
        (query_embedding, query_scale, bias): (&Weight, &Weight, &Weight),
    ) -> Result<O::Value> {
        let num_heads = self.query.num_heads;
        let split = [0, 0, num_heads as i64, (self.width() / num_heads) as i64];
        let units = |ops: &mut O, x: &O::Value| {
            let x = ops.cast(x, Type::F32)?;
            let x = ops.reshape(&x, &split)?;
            unit(ops, &x)
        };
        let join = |ops: &mut O, x: &O::Value| {
            let x = ops.reshape(x, &[0, 0, self.width() as i64])?;
            ops.cast(&x, Type::Model)
        };
        let (key, value) = self.keys_and_values(ops, x)?;
        let q = units(ops, query)?;
        let embedding = ops.weight(query_embedding, Type::F32)?;
        let q = ops.add(&q, &embedding)?;
        let scale = ops.computed(query_scale, Type::F32)?;
        let q = ops.mul(&q, &scale)?;
        let q = join(ops, &q)?;
        let k = units(ops, &key)?;
        let k = join(ops, &k)?;
        let bias = ops.weight(bias, Type::Model)?;
        let attributes =
            routed_attention::Attributes { num_heads, kv_num_heads: num_heads, scale: 1.0, is_causal: false };
        let inputs = routed_attention::Inputs {
            query: Argument::Value(&q),
            key: Argument::Value(&k),
            value: Argument::Value(&value),
            head_gates: Argument::Value(gates),
            attn_bias: Some(Argument::Value(&bias)),
        };
        ops.operator::<RoutedAttention>(attributes, &inputs)
    }
}

/// Adaptive average pooling of (batch, side^2, width) to (batch, pooled^2, width).
fn pool<O: Ops>(ops: &mut O, x: &O::Value, grid: Grid, width: usize) -> Result<O::Value> {
    let (side, pooled) = (grid.side as i64, grid.pooled as i64);
    if side % pooled == 0 {
        let block = side / pooled;
        let x = ops.reshape(x, &[0, pooled, block, pooled, block, width as i64])?;
        let x = ops.reduce(Reduce::Mean, &x, &[2, 4])?;
        return ops.reshape(&x, &[0, pooled * pooled, width as i64]);
    }
    let shape = [grid.pooled * grid.pooled, grid.side * grid.side];
    let matrix = ops.constant(Type::Model, &shape, &grid.pooling_matrix())?;
    ops.matmul(&matrix, x)
}
