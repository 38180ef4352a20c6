//! RoutedProjection and RoutedCombine, word by word.

use crate::schema::Attributes;
use crate::shape::routed_linear::Problem;
use crate::tensor::Tensor;

/// See [`crate::Operator::reference`].
pub(crate) fn projection(attributes: &Attributes, inputs: &[Option<Tensor<'_>>]) -> Vec<f64> {
    let Some((p, x, weight, gates, bias)) = read(attributes, inputs) else { return Vec::new() };
    let mut output = Vec::with_capacity(p.tokens * p.num_heads * p.block);
    for t in 0..p.tokens {
        for h in 0..p.num_heads {
            let on = gates.data.at(t * p.num_heads + h) != 0.0;
            output.extend((0..p.block).map(|d| {
                if !on {
                    return 0.0;
                }
                let w = |c: usize| match p.per_head {
                    true => weight.data.at((h * p.width + c) * p.block + d),
                    false => weight.data.at((h * p.block + d) * p.width + c),
                };
                let sum: f64 = (0..p.width).map(|c| x.data.at(t * p.width + c) * w(c)).sum();
                sum + bias.map_or(0.0, |bias| bias.data.at(h * p.block + d))
            }));
        }
    }
    output
}

/// See [`crate::Operator::reference`].
pub(crate) fn combine(attributes: &Attributes, inputs: &[Option<Tensor<'_>>]) -> Vec<f64> {
    let Some((p, x, weight, gates, bias)) = read(attributes, inputs) else { return Vec::new() };
    let mut output = Vec::with_capacity(p.tokens * p.width);
    for t in 0..p.tokens {
        for c in 0..p.width {
            let mut sum = bias.map_or(0.0, |bias| bias.data.at(c));
            for h in (0..p.num_heads).filter(|h| gates.data.at(t * p.num_heads + h) != 0.0) {
                for d in 0..p.block {
                    let w = match p.per_head {
                        true => weight.data.at((h * p.block + d) * p.width + c),
                        false => weight.data.at((c * p.num_heads + h) * p.block + d),
                    };
                    sum += x.data.at((t * p.num_heads + h) * p.block + d) * w;
                }
            }
            output.push(sum);
        }
    }
    output
}

type Call<'a> = (Problem, Tensor<'a>, Tensor<'a>, Tensor<'a>, Option<Tensor<'a>>);

fn read<'a>(attributes: &Attributes, inputs: &[Option<Tensor<'a>>]) -> Option<Call<'a>> {
    let shapes: Vec<Option<&[usize]>> = inputs.iter().map(|t| t.map(|t| t.shape)).collect();
    let problem = Problem::new(attributes, &shapes).ok()?;
    let get = |i: usize| inputs.get(i).copied().flatten();
    Some((problem, get(0)?, get(1)?, get(2)?, get(3)))
}
