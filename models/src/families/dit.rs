//! MoH-DiT, and DiT with every head on: a diffusion transformer (arXiv 2212.09748) as the MoH authors published it.
//!
//! Module and tensor names are those of the published code. Its `routed_head` is the number of *active* routed heads, top_k.

use super::vit::to_tokens;
use super::{Family, Inputs, Layer, Port, PortDim, Sizes, Workload};
use crate::checkpoint::{Checkpoint, Config, Loader, Weight};
use crate::error::Error;
use crate::heads::{MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH};
use crate::layers::HeadLinear;
use crate::ops::{Argument, Conv, Linear, Ops, Result, Tap, Type, Unary};
use crate::router::{HeadCounts, HeadSet, Router, TwoStage, load_linear};
use crate::sample::{Rng, Sample, SampleData};
use moh_operators::{RoutedAttention, routed_attention};

/// A DiT with its weights.
pub struct Dit {
    in_channels: usize,
    out_channels: usize,
    input_size: usize,
    patch_size: usize,
    hidden_size: usize,
    num_labels: usize,
    norm_eps: f32,
    frequencies: Vec<f32>,
    x_embedder: Linear,
    t_embedder: [Linear; 2],
    y_embedder: Weight,
    pos_embed: Weight,
    blocks: Vec<Block>,
    final_modulation: Linear,
    final_linear: Linear,
}

struct Block {
    head_dim: usize,
    router: Router,
    modulation: Linear,
    query: HeadLinear,
    key: Linear,
    value: Linear,
    proj: HeadLinear,
    fc1: Linear,
    fc2: Linear,
}

/// Keys that only a routed model has.
const ROUTING: &[&str] = &["shared_head", "routed_head", "shared_heads"];

/// More pixels or latents a side, patches a side and channels than any model has.
const MAX_SIZE: usize = 1 << 14;
const MAX_SIDE: usize = 1 << 10;
const MAX_CHANNELS: usize = 1 << 10;

/// Period of the slowest timestep frequency.
const MAX_PERIOD: f32 = 10_000.0;

impl Dit {
    fn tokens(&self) -> usize {
        (self.input_size / self.patch_size).pow(2)
    }
}

/// Head counts and widths of every block.
fn block_heads(config: &Config, routed: bool, depth: usize, hidden_size: usize) -> Result<Vec<(HeadSet, usize)>> {
    let num_heads = config.size_or_list("num_heads", depth, MAX_HEADS)?;
    config.note_default("head_dim", "hidden_size / num_heads");
    let head_dims = match config.has("head_dim") {
        true => config.size_or_list("head_dim", depth, MAX_HEAD_DIM)?,
        false => {
            let divides = |&heads: &usize| hidden_size.is_multiple_of(heads);
            if let Some(heads) = num_heads.iter().find(|h| !divides(h)) {
                let expected = format!("divisors of hidden_size = {hidden_size}, as there is no head_dim");
                return Err(config.rejects("num_heads", expected, heads.to_string()));
            }
            num_heads.iter().map(|heads| hidden_size / heads).collect()
        }
    };
    let counted = || -> Result<Vec<HeadSet>> {
        let (shared, top_k) =
            (config.usize_or_list("shared_head", depth)?, config.usize_or_list("routed_head", depth)?);
        let set = |i: usize| {
            let counts = HeadCounts { num_heads: num_heads[i], num_shared_heads: shared[i], top_k: top_k[i] };
            counts.check().map_err(|found| {
                config.rejects("shared_head, routed_head", "counts that make a router", format!("layer {i}: {found}"))
            })?;
            Ok(HeadSet::first(counts))
        };
        (0..depth).map(set).collect()
    };
    let sets = match (routed, HeadSet::configured(config, &num_heads, "routed_head")?) {
        (true, Some(sets)) => sets,
        (true, None) => counted()?,
        (false, _) => num_heads.iter().map(|&heads| HeadSet::first(HeadCounts::dense(heads))).collect(),
    };
    Ok(sets.into_iter().zip(head_dims).collect())
}

impl Family for Dit {
    fn load(name: &str, checkpoint: &Checkpoint) -> Result<Dit> {
        let config = checkpoint.config();
        let routed = name == "moh-dit";
        if !routed {
            config.refuse(ROUTING, "no such key in a dense `dit`: a routed model is of family moh-dit")?;
        }
        let (input_size, patch_size) = (config.size("input_size", MAX_SIZE)?, config.size("patch_size", MAX_SIZE)?);
        if !input_size.is_multiple_of(patch_size) {
            let expected = format!("a multiple of patch_size = {patch_size}");
            return Err(config.rejects("input_size", expected, input_size.to_string()));
        }
        if input_size / patch_size > MAX_SIDE {
            let expected = format!("at most {MAX_SIDE} times patch_size = {patch_size}");
            return Err(config.rejects("input_size", expected, input_size.to_string()));
        }
        let (hidden_size, depth) = (config.size("hidden_size", MAX_WIDTH)?, config.size("depth", MAX_LAYERS)?);
        let in_channels = config.size("in_channels", MAX_CHANNELS)?;
        let num_classes = config.size("num_classes", MAX_VOCABULARY)?;
        let frequency_size = config.size_or("frequency_embedding_size", 256, MAX_WIDTH)?;
        if !frequency_size.is_multiple_of(2) {
            return Err(config.rejects("frequency_embedding_size", "an even number", frequency_size.to_string()));
        }
        let out_channels = if config.bool_or("learn_sigma", true)? { 2 * in_channels } else { in_channels };
        let num_labels = num_classes + usize::from(config.f64_or("class_dropout_prob", 0.1)? > 0.0);
        let mlp_size = (hidden_size as f64 * config.f64_or("mlp_ratio", 4.0)?) as usize;
        if !(1..=MAX_WIDTH).contains(&mlp_size) {
            let expected = format!("a ratio that makes 1 to {MAX_WIDTH} of hidden_size = {hidden_size}");
            return Err(config.invalid("mlp_ratio", expected));
        }
        let heads = block_heads(config, routed, depth, hidden_size)?;

        let mut loader = Loader::new(checkpoint);
        let l = &mut loader;
        let blocks = heads.into_iter().enumerate().map(|(i, (set, head_dim))| {
            let counts = set.counts();
            let (path, inner) = (format!("blocks.{i}"), counts.num_heads * head_dim);
            // Keys and values of every head are needed, queries only where the router wants them.
            let qkv = load_linear(l, &format!("{path}.attn.qkv"), 3 * inner, hidden_size, true);
            let query = qkv.rows(0..inner).over_heads(counts.num_heads);
            Block {
                head_dim,
                router: match routed {
                    true => Router::TwoStage(TwoStage::load(l, &format!("{path}.attn"), hidden_size, set)),
                    false => Router::Dense(counts.num_heads),
                },
                modulation: load_linear(l, &format!("{path}.adaLN_modulation.1"), 6 * hidden_size, hidden_size, true),
                query,
                key: qkv.rows(inner..2 * inner),
                value: qkv.rows(2 * inner..3 * inner),
                proj: load_linear(l, &format!("{path}.attn.proj"), hidden_size, inner, true)
                    .over_heads(counts.num_heads),
                fc1: load_linear(l, &format!("{path}.mlp.fc1"), mlp_size, hidden_size, true),
                fc2: load_linear(l, &format!("{path}.mlp.fc2"), hidden_size, mlp_size, true),
            }
        });
        let blocks = blocks.collect();
        let tokens = (input_size / patch_size).pow(2);
        let half = frequency_size / 2;
        // In f32 and in this order, as the published code: the angle t * f is sensitive to the last digit of f.
        let frequency = |i: usize| (-MAX_PERIOD.ln() * i as f32 / half as f32).exp();
        let dit = Dit {
            in_channels,
            out_channels,
            input_size,
            patch_size,
            hidden_size,
            num_labels,
            norm_eps: config.eps_or("norm_eps", 1e-6)?,
            frequencies: (0..half).map(frequency).collect(),
            x_embedder: Linear {
                weight: l.weight("x_embedder.proj.weight", &[hidden_size, in_channels, patch_size, patch_size]),
                bias: Some(l.weight("x_embedder.proj.bias", &[hidden_size])),
            },
            t_embedder: [
                load_linear(l, "t_embedder.mlp.0", hidden_size, frequency_size, true),
                load_linear(l, "t_embedder.mlp.2", hidden_size, hidden_size, true),
            ],
            y_embedder: l.weight("y_embedder.embedding_table.weight", &[num_labels, hidden_size]),
            pos_embed: l.weight("pos_embed", &[1, tokens, hidden_size]),
            blocks,
            final_modulation: load_linear(l, "final_layer.adaLN_modulation.1", 2 * hidden_size, hidden_size, true),
            final_linear: load_linear(l, "final_layer.linear", patch_size.pow(2) * out_channels, hidden_size, true),
        };
        loader.finish(|_| false)?;
        Ok(dit)
    }

    fn layers(&self) -> Vec<Layer> {
        let layer = |(i, block): (usize, &Block)| {
            let heads = block.router.heads();
            let path = format!("blocks.{i}.attn");
            Layer { path, heads, kv_num_heads: heads.num_heads, head_dim: block.head_dim }
        };
        self.blocks.iter().enumerate().map(layer).collect()
    }

    fn inputs(&self) -> Vec<Port> {
        let (batch, size) = (PortDim::Named("batch"), PortDim::Fixed(self.input_size));
        vec![
            Port::new("hidden_states", Type::Model, &[batch, PortDim::Fixed(self.in_channels), size, size]),
            Port::new("timestep", Type::F32, &[batch]),
            Port::new("class_labels", Type::I64, &[batch]),
        ]
    }

    fn outputs(&self) -> Vec<Port> {
        let (batch, size) = (PortDim::Named("batch"), PortDim::Fixed(self.input_size));
        vec![Port::new("out_hidden_states", Type::Model, &[batch, PortDim::Fixed(self.out_channels), size, size])]
    }

    fn workload(&self) -> Workload {
        Workload { sizes: vec![("batch", 1)], tokens: self.tokens() }
    }

    fn resized(&self, tokens: usize) -> Option<(&'static str, usize)> {
        let floor = tokens.isqrt();
        let side = if floor * floor < tokens { floor + 1 } else { floor };
        Some(("input_size", side * self.patch_size))
    }

    fn samples(&self, sizes: &Sizes) -> Vec<Vec<Sample>> {
        let (rng, batch) = (&mut Rng::new(1), sizes.or("batch", 3));
        let images = rng.normals("hidden_states", &[batch, self.in_channels, self.input_size, self.input_size]);
        let timestep = SampleData::F32([0.0, 312.5, 981.0].into_iter().cycle().take(batch).collect());
        let mut labels = rng.ids("class_labels", &[batch], self.num_labels);
        if let SampleData::I64(labels) = &mut labels.data {
            labels[batch - 1] = self.num_labels as i64 - 1;
        }
        vec![vec![images, Sample { name: "timestep".to_owned(), shape: vec![batch], data: timestep }, labels]]
    }

    fn forward<O: Ops>(&self, ops: &mut O, inputs: &Inputs<O::Value>) -> Result<Vec<O::Value>> {
        let (width, grid) = (self.hidden_size as i64, (self.input_size / self.patch_size) as i64);
        let mut x = ops.scoped("x_embedder", |ops| {
            let images = inputs.get("hidden_states")?;
            let conv = Conv { stride: self.patch_size, padding: 0, groups: 1 };
            let x = ops.conv2d(&images, &self.x_embedder.weight, self.x_embedder.bias.as_ref(), conv)?;
            let x = to_tokens(ops, &x, width, grid)?;
            ops.tap(Tap::Output, &x)?;
            Ok(x)
        })?;
        let positions = ops.weight(&self.pos_embed, Type::Model)?;
        x = ops.add(&x, &positions)?;

        let t = ops.scoped("t_embedder", |ops| self.embed_timestep(ops, &inputs.get("timestep")?))?;
        let y = ops.scoped("y_embedder", |ops| {
            let y = ops.embedding(&self.y_embedder, &inputs.get("class_labels")?)?;
            ops.tap(Tap::Output, &y)?;
            Ok(y)
        })?;
        let c = ops.add(&t, &y)?;
        let c = ops.silu(&c)?;
        for (i, block) in self.blocks.iter().enumerate() {
            x = ops.scoped(&format!("blocks.{i}"), |ops| self.block(ops, block, &x, &c))?;
        }
        let x = ops.scoped("final_layer", |ops| {
            let parts = modulation(ops, &self.final_modulation, &c, 2, width)?;
            let x = self.modulated_norm(ops, &x, &parts[0], &parts[1])?;
            let x = ops.linear(&x, &self.final_linear)?;
            ops.tap(Tap::Output, &x)?;
            Ok(x)
        })?;

        let (patch, channels) = (self.patch_size as i64, self.out_channels as i64);
        let x = ops.reshape(&x, &[0, grid, grid, patch, patch, channels])?;
        let x = ops.transpose(&x, &[0, 5, 1, 3, 2, 4])?;
        Ok(vec![ops.reshape(&x, &[0, channels, grid * patch, grid * patch])?])
    }
}

/// The parts of an adaLN modulation, each (batch, 1, width).
fn modulation<O: Ops>(ops: &mut O, linear: &Linear, c: &O::Value, parts: usize, width: i64) -> Result<Vec<O::Value>> {
    ops.scoped("adaLN_modulation", |ops| {
        let all = ops.linear(c, linear)?;
        let all = ops.reshape(&all, &[0, parts as i64, width])?;
        (0..parts).map(|i| ops.slice(&all, 1, i, i + 1)).collect()
    })
}

impl Dit {
    fn embed_timestep<O: Ops>(&self, ops: &mut O, timestep: &O::Value) -> Result<O::Value> {
        let t = ops.reshape(timestep, &[-1, 1])?;
        let frequencies = ops.constant(Type::F32, &[1, self.frequencies.len()], &self.frequencies)?;
        let angle = ops.mul(&t, &frequencies)?;
        let (cos, sin) = (ops.unary(Unary::Cos, &angle)?, ops.unary(Unary::Sin, &angle)?);
        let x = ops.concat(&[&cos, &sin], 1)?;
        let x = ops.cast(&x, Type::Model)?;
        let x = ops.linear(&x, &self.t_embedder[0])?;
        let x = ops.silu(&x)?;
        let x = ops.linear(&x, &self.t_embedder[1])?;
        ops.tap(Tap::Output, &x)?;
        Ok(x)
    }

    /// LN(x) (1 + scale) + shift.
    fn modulated_norm<O: Ops>(
        &self,
        ops: &mut O,
        x: &O::Value,
        shift: &O::Value,
        scale: &O::Value,
    ) -> Result<O::Value> {
        let x = ops.layer_norm(x, self.hidden_size, None, self.norm_eps)?;
        let one = ops.scalar(Type::Model, 1.0)?;
        let scale = ops.add(scale, &one)?;
        let x = ops.mul(&x, &scale)?;
        ops.add(&x, shift)
    }

    fn block<O: Ops>(&self, ops: &mut O, block: &Block, x: &O::Value, c: &O::Value) -> Result<O::Value> {
        let parts = modulation(ops, &block.modulation, c, 6, self.hidden_size as i64)?;
        let [shift1, scale1, gate1, shift2, scale2, gate2] = parts.as_slice() else {
            return Err(Error::Internal("a modulation of six parts"));
        };
        let normed = self.modulated_norm(ops, x, shift1, scale1)?;
        let attended = ops.scoped("attn", |ops| attention(ops, block, &normed))?;
        let attended = ops.mul(gate1, &attended)?;
        let x = ops.add(x, &attended)?;

        let normed = self.modulated_norm(ops, &x, shift2, scale2)?;
        let fed = ops.scoped("mlp", |ops| {
            let h = ops.linear(&normed, &block.fc1)?;
            let h = ops.unary(Unary::GeluTanh, &h)?;
            let h = ops.linear(&h, &block.fc2)?;
            ops.tap(Tap::Output, &h)?;
            Ok(h)
        })?;
        let fed = ops.mul(gate2, &fed)?;
        let x = ops.add(&x, &fed)?;
        ops.tap(Tap::Output, &x)?;
        Ok(x)
    }
}

fn attention<O: Ops>(ops: &mut O, block: &Block, x: &O::Value) -> Result<O::Value> {
    ops.tap(Tap::AttentionInput, x)?;
    let gates = block.router.forward(ops, x)?;
    let num_heads = block.router.heads().num_heads;
    let q = block.query.project(ops, x, &gates)?;
    let (k, v) = (ops.linear(x, &block.key)?, ops.linear(x, &block.value)?);
    let scale = (block.head_dim as f32).powf(-0.5);
    let attributes = routed_attention::Attributes { num_heads, kv_num_heads: num_heads, scale, is_causal: false };
    let inputs = routed_attention::Inputs {
        query: Argument::Value(&q),
        key: Argument::Value(&k),
        value: Argument::Value(&v),
        head_gates: Argument::Value(&gates),
        attn_bias: None,
    };
    let x = ops.operator::<RoutedAttention>(attributes, &inputs)?;
    let x = block.proj.combine(ops, &x, &gates)?;
    ops.tap(Tap::AttentionOutput, &x)?;
    Ok(x)
}
