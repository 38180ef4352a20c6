//! RoutedAggregatedAttention: every head's attention to windows and pooled tokens, and then the gates.

use super::{Computed, ModelOperator, Trained};
use crate::algebra::{mask_heads, softmax};
use crate::error::Result;
use crate::fused::aggregated::{Forward, Numbers, Sizes};
use crate::macs::Macs;
use crate::shape::Shape;
use candle_core::{D, DType, Tensor};
use moh_operators::aggregated_attention::{Attributes, Inputs, RoutedAggregatedAttention};
use moh_operators::{Definition as _, List};

impl ModelOperator for RoutedAggregatedAttention {
    fn compute(attributes: &Attributes, inputs: &Inputs<List<'_, &Tensor>>) -> Result<Computed> {
        let device = inputs.query.device();
        let (batch, tokens, width) = inputs.query.dims3()?;
        let (heads, cells) = (attributes.num_heads, attributes.window * attributes.window);
        let dim = width / heads;
        let per_head = |x: &Tensor| x.reshape((batch, x.dim(1)?, heads, dim))?.transpose(1, 2)?.contiguous();
        let unit = |x: &Tensor| x.broadcast_div(&x.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?.maximum(1e-12)?);
        let qn = unit(&per_head(inputs.query)?)?;
        let embedding = inputs.query_embedding.unsqueeze(1)?;
        let scale = inputs.query_scale.t()?.unsqueeze(D::Minus1)?;
        let qs = qn.broadcast_add(&embedding)?.broadcast_mul(&scale)?;

        // Window cells as rows of a padded token list: row `tokens` is zero, and -inf in the scores.
        let (cell, outside) = window_cells(attributes);
        let cell = Tensor::from_vec(cell, (tokens * cells,), device)?;
        let outside = Tensor::from_vec(outside, (tokens, cells), device)?;
        let windows = |x: &Tensor| -> Result<Tensor> {
            let zero = Tensor::zeros((batch, heads, 1, dim), DType::F32, device)?;
            let rows = Tensor::cat(&[x, &zero], 2)?.index_select(&cell, 2)?;
            Ok(rows.reshape((batch, heads, tokens, cells, dim))?)
        };
        let local_keys = windows(&unit(&per_head(inputs.key)?)?)?;
        let local = local_keys.broadcast_mul(&qs.unsqueeze(3)?)?.sum(D::Minus1)?;
        let local = local.broadcast_add(&inputs.local_bias.unsqueeze(1)?)?.broadcast_add(&outside)?;
        let pooled = qs.matmul(&unit(&per_head(inputs.pooled_key)?)?.t()?)?;
        let pooled = pooled.broadcast_add(inputs.pooled_bias)?;
        let weights = softmax(&Tensor::cat(&[&local, &pooled], 3)?)?;
        let learnt = qn.broadcast_matmul(inputs.learnable_tokens)?;
        let learnt = learnt.broadcast_add(&inputs.learnable_bias.unsqueeze(1)?)?;
        let local = (weights.narrow(3, 0, cells)? + learnt)?;
        let values = windows(&per_head(inputs.value)?)?;
        let local = values.broadcast_mul(&local.unsqueeze(D::Minus1)?)?.sum(3)?;
        let pooled = weights.narrow(3, cells, pooled.dim(3)?)?.matmul(&per_head(inputs.pooled_value)?)?;
        let heads_out = (local + pooled)?.broadcast_mul(&inputs.head_gates.transpose(1, 2)?.unsqueeze(D::Minus1)?)?;
        Ok(mask_heads(&heads_out.transpose(1, 2)?.reshape((batch, tokens, width))?, inputs.head_gates)?.into())
    }

    fn train(
        attributes: &Attributes,
        inputs: &Inputs<List<'_, &Tensor>>,
        _: &dyn Fn(&Tensor) -> bool,
    ) -> Result<Option<Trained>> {
        let (batch, _, width) = inputs.query.dims3()?;
        let (heads, device) = (attributes.num_heads, inputs.query.device().clone());
        let sizes = Sizes {
            batch,
            heads,
            dim: width / heads,
            grid: [attributes.height, attributes.width],
            window: attributes.window,
            pooled: inputs.pooled_key.dim(1)?,
        };
        let numbers = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        let given = Numbers {
            query: numbers(inputs.query)?,
            key: numbers(inputs.key)?,
            value: numbers(inputs.value)?,
            pooled_key: numbers(inputs.pooled_key)?,
            pooled_value: numbers(inputs.pooled_value)?,
            gates: numbers(inputs.head_gates)?,
            query_embedding: numbers(inputs.query_embedding)?,
            query_scale: numbers(inputs.query_scale)?,
            local_bias: numbers(inputs.local_bias)?,
            pooled_bias: numbers(inputs.pooled_bias)?,
            learnable_tokens: numbers(inputs.learnable_tokens)?,
            learnable_bias: numbers(inputs.learnable_bias)?,
        };
        let shapes = RoutedAggregatedAttention::list(inputs).into_iter().flatten().map(|x| x.dims().to_vec());
        let shapes: Vec<Vec<usize>> = shapes.collect();
        let forward = Forward::new(sizes, given);
        let y = forward.output(&device)?;
        let back = move |gradient: &Tensor| {
            let gradients = forward.back(&gradient.flatten_all()?.to_vec1()?);
            let tensor = |(numbers, shape)| Ok(Some(Tensor::from_vec(numbers, shape, &device)?));
            gradients.into_iter().zip(shapes).map(tensor).collect()
        };
        Ok(Some((y, Box::new(back))))
    }

    fn macs(attributes: &Attributes, inputs: &Inputs<List<'_, &Shape>>) -> Macs {
        let (cells, pooled) = (attributes.window.pow(2), inputs.pooled_key.dims()[1]);
        // Scores and values of the window and of the pooled tokens, and the learnable tokens.
        let per_channel = 3 * cells + 2 * pooled;
        Macs::of_heads(inputs.query.elements().saturating_mul(per_channel), attributes.num_heads, inputs.head_gates)
    }
}

/// For every token and window cell the cell's token (the number of tokens where it lies outside), and 0 or -inf.
fn window_cells(attributes: &Attributes) -> (Vec<u32>, Vec<f32>) {
    let Attributes { height, width, window, .. } = *attributes;
    let (mut cells, mut outside) = (Vec::new(), Vec::new());
    let reach = window / 2;
    for y in 0..height {
        for x in 0..width {
            for i in 0..window * window {
                let (cy, cx) = ((y + i / window).wrapping_sub(reach), (x + i % window).wrapping_sub(reach));
                let inside = cy < height && cx < width;
                cells.push(if inside { cy * width + cx } else { height * width } as u32);
                outside.push(if inside { 0.0 } else { f32::NEG_INFINITY });
            }
        }
    }
    (cells, outside)
}
