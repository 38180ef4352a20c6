//! MoH-ViT, and TransNeXt with every head on: an image classifier of four stages (arXiv 2311.17132) as the MoH authors
//! published it. Module and tensor names are theirs; `routed_head` is the number of *active* routed heads, top_k. With the keys
//! of [`crate::mixture`], one number a block, a block's MLP is a mixture of plain experts.

mod attention;
mod constants;
mod shape;

use super::{Family, Inputs, Layer, Port, PortDim, Sizes, Workload};
use crate::checkpoint::{Checkpoint, Config, Loader, Weight};
use crate::heads::MAX_VOCABULARY;
use crate::mixture::{ExpertCounts, Mixture};
use crate::ops::{Conv, Linear, Ops, Reduce, Result, Tap, Type, Unary};
use crate::router::{HeadSet, Router, TwoStage, load_linear};
use crate::sample::{Rng, Sample};
use attention::{Module, Raw};
use moh_operators::routed_mlp::Activation;
use shape::{Shape, shapes};

/// A ViT with its weights.
pub struct Vit {
    image_size: usize,
    channels: usize,
    num_classes: usize,
    stages: Vec<Stage>,
    head: Linear,
}

struct Stage {
    shape: Shape,
    patch: Conv,
    patch_embed: Linear,
    patch_norm: Norm,
    blocks: Vec<Block>,
    norm: Norm,
}

struct Block {
    norm1: Norm,
    attention: Module,
    norm2: Norm,
    mlp: Mlp,
}

enum Mlp {
    /// The convolutional GLU: fc2(gelu(depthwise(u)) * v).
    Gated {
        gated: Linear,
        gate: Linear,
        depthwise: Linear,
        out: Linear,
    },
    Mixture(Box<Mixture>),
}

/// A LayerNorm.
struct Norm {
    weight: Weight,
    bias: Weight,
    eps: f32,
}

/// Heads and experts of every block, stage by stage.
fn block_plans(config: &Config, routed: bool, shapes: &[Shape]) -> Result<Vec<BlockPlan>> {
    let blocks: Vec<&Shape> = shapes.iter().flat_map(|shape| std::iter::repeat_n(shape, shape.depth)).collect();
    let num_heads: Vec<usize> = blocks.iter().map(|shape| shape.heads.num_heads).collect();
    let sets = match routed {
        true => HeadSet::configured(config, &num_heads, "top_k")?
            .unwrap_or_else(|| blocks.iter().map(|shape| HeadSet::first(shape.heads)).collect())
            .into_iter()
            .map(Some)
            .collect(),
        false => vec![None; blocks.len()],
    };
    let experts = ExpertCounts::configured(config, blocks.len())?;
    Ok(sets.into_iter().zip(experts).map(|(heads, experts)| BlockPlan { heads, experts }).collect())
}

fn load_norm(l: &mut Loader<'_>, path: &str, width: usize, eps: f32) -> Norm {
    Norm {
        weight: l.weight(&format!("{path}.weight"), &[width]),
        bias: l.weight(&format!("{path}.bias"), &[width]),
        eps,
    }
}

fn load_conv(l: &mut Loader<'_>, path: &str, shape: &[usize]) -> Linear {
    Linear {
        weight: l.weight(&format!("{path}.weight"), shape),
        bias: Some(l.weight(&format!("{path}.bias"), &shape[..1])),
    }
}

/// A block whose attention's constants are not folded yet.
struct RawBlock {
    norms: [Norm; 2],
    attention: Raw,
    mlp: RawMlp,
}

enum RawMlp {
    /// fc1, the depthwise convolution, fc2.
    Gated([Linear; 3]),
    Mixture(Box<Mixture>),
}

/// What a block's configuration says beyond its stage's.
#[derive(Clone)]
struct BlockPlan {
    /// `None`: every head on.
    heads: Option<HeadSet>,
    experts: Option<ExpertCounts>,
}

fn load_block(l: &mut Loader<'_>, path: &str, shape: &Shape, plan: BlockPlan, eps: f32) -> RawBlock {
    let (width, hidden) = (shape.width, shape.mlp_hidden);
    let attention = format!("{path}.attn");
    let router = match plan.heads {
        Some(heads) => Router::TwoStage(TwoStage::load(l, &attention, width, heads)),
        None => Router::Dense(shape.heads.num_heads),
    };
    let mlp = match plan.experts {
        Some(counts) => {
            let mixture = Mixture::load(l, &format!("{path}.mlp"), counts, (width, hidden), Activation::Gelu);
            RawMlp::Mixture(Box::new(mixture))
        }
        None => RawMlp::Gated([
            load_linear(l, &format!("{path}.mlp.fc1"), 2 * hidden, width, true),
            load_conv(l, &format!("{path}.mlp.dwconv.dwconv"), &[hidden, 1, 3, 3]),
            load_linear(l, &format!("{path}.mlp.fc2"), width, hidden, true),
        ]),
    };
    RawBlock {
        norms: ["norm1", "norm2"].map(|name| load_norm(l, &format!("{path}.{name}"), width, eps)),
        attention: Raw::load(l, &attention, shape, router),
        mlp,
    }
}

impl RawBlock {
    fn fold(self, shape: &Shape) -> Result<Block> {
        let [norm1, norm2] = self.norms;
        let hidden = shape.mlp_hidden;
        let mlp = match self.mlp {
            RawMlp::Mixture(mixture) => Mlp::Mixture(mixture),
            RawMlp::Gated([fc1, depthwise, out]) => {
                let (gated, gate) = (fc1.rows(0..hidden), fc1.rows(hidden..2 * hidden));
                Mlp::Gated { gated, gate, depthwise, out }
            }
        };
        Ok(Block { norm1, attention: self.attention.fold(shape)?, norm2, mlp })
    }
}

impl Family for Vit {
    fn load(name: &str, checkpoint: &Checkpoint) -> Result<Vit> {
        let config = checkpoint.config();
        let routed = name == "moh-vit";
        if !routed {
            let routing = ["shared_head", "routed_head", "shared_heads"];
            config.refuse(&routing, "no such key in a dense `vit`: a routed model is of family moh-vit")?;
        }
        let (image_size, channels) = (config.size("img_size", 1 << 16)?, config.size_or("in_chans", 3, 1 << 10)?);
        let num_classes = config.size("num_classes", MAX_VOCABULARY)?;
        let patch_size = config.size_or("patch_size", 4, 64)?;
        let shapes = shapes(config, routed, image_size, patch_size)?;
        let mut plans = block_plans(config, routed, &shapes)?.into_iter();
        let norm_eps = config.eps_or("norm_eps", 1e-6)?;
        let patch_eps = config.eps_or("patch_embed_norm_eps", 1e-5)?;

        let mut loader = Loader::new(checkpoint);
        let l = &mut loader;
        let mut raw = Vec::new();
        let mut inputs = channels;
        for (i, shape) in shapes.iter().enumerate() {
            let (kernel, stride) = if i == 0 { (2 * patch_size - 1, patch_size) } else { (3, 2) };
            let patch = Conv { stride, padding: kernel / 2, groups: 1 };
            let path = format!("patch_embed{}", i + 1);
            let embed = load_conv(l, &format!("{path}.proj"), &[shape.width, inputs, kernel, kernel]);
            let patch_norm = load_norm(l, &format!("{path}.norm"), shape.width, patch_eps);
            let block =
                |(j, plan): (usize, BlockPlan)| load_block(l, &format!("block{}.{j}", i + 1), shape, plan, norm_eps);
            let blocks: Vec<RawBlock> = plans.by_ref().take(shape.depth).enumerate().map(block).collect();
            let norm = load_norm(l, &format!("norm{}", i + 1), shape.width, norm_eps);
            raw.push((patch, embed, patch_norm, blocks, norm));
            inputs = shape.width;
        }
        let head = load_linear(l, "head", num_classes, inputs, true);
        // Buffers that follow from the configuration.
        let buffers = ["relative_coords_table", "relative_pos_index", "seq_length_scale", "padding_mask"];
        loader.finish(|name| buffers.iter().any(|buffer| name.ends_with(buffer)))?;

        let stages = raw.into_iter().zip(shapes).map(|((patch, patch_embed, patch_norm, blocks, norm), shape)| {
            Ok(Stage {
                patch,
                patch_embed,
                patch_norm,
                blocks: blocks.into_iter().map(|block| block.fold(&shape)).collect::<Result<_>>()?,
                norm,
                shape,
            })
        });
        Ok(Vit { image_size, channels, num_classes, stages: stages.collect::<Result<_>>()?, head })
    }

    fn layers(&self) -> Vec<Layer> {
        let layer = |i: usize, j: usize, stage: &Stage| Layer {
            path: format!("block{}.{j}.attn", i + 1),
            heads: stage.blocks[j].attention.router.heads(),
            kv_num_heads: stage.shape.heads.num_heads,
            head_dim: stage.shape.head_dim(),
        };
        let stages = self.stages.iter().enumerate();
        stages.flat_map(|(i, stage)| (0..stage.blocks.len()).map(move |j| layer(i, j, stage))).collect()
    }

    fn inputs(&self) -> Vec<Port> {
        let size = PortDim::Fixed(self.image_size);
        let dims = [PortDim::Named("batch"), PortDim::Fixed(self.channels), size, size];
        vec![Port::new("pixel_values", Type::Model, &dims)]
    }

    fn outputs(&self) -> Vec<Port> {
        vec![Port::new("logits", Type::Model, &[PortDim::Named("batch"), PortDim::Fixed(self.num_classes)])]
    }

    fn workload(&self) -> Workload {
        // An image counts as the tokens of its first stage.
        Workload { sizes: vec![("batch", 1)], tokens: self.stages[0].shape.side.pow(2) }
    }

    fn samples(&self, sizes: &Sizes) -> Vec<Vec<Sample>> {
        let shape = [sizes.or("batch", 2), self.channels, self.image_size, self.image_size];
        vec![vec![Rng::new(3).normals("pixel_values", &shape)]]
    }

    fn forward<O: Ops>(&self, ops: &mut O, inputs: &Inputs<O::Value>) -> Result<Vec<O::Value>> {
        let mut image = inputs.get("pixel_values")?;
        let mut tokens = image.clone();
        for (i, stage) in self.stages.iter().enumerate() {
            let (width, side) = (stage.shape.width as i64, stage.shape.side as i64);
            let mut x = ops.scoped(&format!("patch_embed{}", i + 1), |ops| {
                let x = ops.conv2d(&image, &stage.patch_embed.weight, stage.patch_embed.bias.as_ref(), stage.patch)?;
                let x = to_tokens(ops, &x, width, side)?;
                tapped(ops, &stage.patch_norm, &x)
            })?;
            for (j, block) in stage.blocks.iter().enumerate() {
                x = ops.scoped(&format!("block{}.{j}", i + 1), |ops| block.forward(ops, &x, side))?;
            }
            tokens = ops.scoped(&format!("norm{}", i + 1), |ops| tapped(ops, &stage.norm, &x))?;
            if i + 1 < self.stages.len() {
                image = to_image(ops, &tokens, width, side)?;
            }
        }
        let mean = ops.reduce(Reduce::Mean, &tokens, &[1])?;
        let mean = ops.reshape(&mean, &[0, -1])?;
        Ok(vec![ops.linear(&mean, &self.head)?])
    }
}

fn to_image<O: Ops>(ops: &mut O, x: &O::Value, channels: i64, side: i64) -> Result<O::Value> {
    let x = ops.reshape(x, &[0, side, side, channels])?;
    ops.transpose(&x, &[0, 3, 1, 2])
}

/// The reverse of [`to_image`]. Both transpose images, not matrices: runtimes whose convolutions have layouts of their own
/// convert from and to channels last in one step.
pub(super) fn to_tokens<O: Ops>(ops: &mut O, x: &O::Value, channels: i64, side: i64) -> Result<O::Value> {
    let x = ops.transpose(x, &[0, 2, 3, 1])?;
    ops.reshape(&x, &[0, side * side, channels])
}

fn normed<O: Ops>(ops: &mut O, norm: &Norm, x: &O::Value) -> Result<O::Value> {
    let width = norm.weight.elements();
    ops.layer_norm(x, width, Some((&norm.weight, &norm.bias)), norm.eps)
}

fn tapped<O: Ops>(ops: &mut O, norm: &Norm, x: &O::Value) -> Result<O::Value> {
    let x = normed(ops, norm, x)?;
    ops.tap(Tap::Output, &x)?;
    Ok(x)
}

impl Block {
    fn forward<O: Ops>(&self, ops: &mut O, x: &O::Value, side: i64) -> Result<O::Value> {
        let y = normed(ops, &self.norm1, x)?;
        let y = ops.scoped("attn", |ops| self.attention.forward(ops, &y))?;
        let x = ops.add(x, &y)?;
        let y = normed(ops, &self.norm2, &x)?;
        let y = ops.scoped("mlp", |ops| self.mlp.forward(ops, &y, side))?;
        let x = ops.add(&x, &y)?;
        ops.tap(Tap::Output, &x)?;
        Ok(x)
    }
}

impl Mlp {
    fn forward<O: Ops>(&self, ops: &mut O, x: &O::Value, side: i64) -> Result<O::Value> {
        let y = match self {
            Mlp::Mixture(mixture) => mixture.forward(ops, x)?,
            Mlp::Gated { gated, gate, depthwise, out } => {
                let hidden = depthwise.weight.shape()[0];
                let u = ops.linear(x, gated)?;
                let u = to_image(ops, &u, hidden as i64, side)?;
                let conv = Conv { stride: 1, padding: 1, groups: hidden };
                let u = ops.conv2d(&u, &depthwise.weight, depthwise.bias.as_ref(), conv)?;
                let u = to_tokens(ops, &u, hidden as i64, side)?;
                let u = ops.unary(Unary::Gelu, &u)?;
                let v = ops.linear(x, gate)?;
                let h = ops.mul(&u, &v)?;
                ops.linear(&h, out)?
            }
        };
        ops.tap(Tap::Output, &y)?;
        Ok(y)
    }
}
