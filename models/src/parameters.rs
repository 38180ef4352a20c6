//! Trainable tensors by their names in the model.

use crate::checkpoint::{Checkpoint, Part, Weight};
use crate::error::{Error, Result};
use crate::families::Model;
use crate::initial;
use candle_core::{DType, Device, Tensor, Var};
use std::collections::BTreeMap;

/// A model's tensors as candle variables in float32, by name: what [`crate::eager::Eager::with_parameters`] computes with, and what
/// gradients are taken of.
///
/// Models that share tensors, such as encoder and decoder with one embedding, share one such set.
#[derive(Debug, Clone)]
pub struct Parameters {
    vars: BTreeMap<String, Var>,
    device: Device,
}

impl Parameters {
    /// Variables of the tensors of `models` that exist already, such as those of candle's `VarMap`. They are shared, not copied.
    ///
    /// # Errors
    /// [`Error::Variable`] for one that is not in float32, on another device or of another shape than the models', and for a tensor
    /// without a variable.
    pub fn new(
        vars: impl IntoIterator<Item = (String, Var)>,
        models: &[&Model],
        device: &Device,
    ) -> Result<Parameters> {
        let vars: BTreeMap<String, Var> = vars.into_iter().collect();
        for (name, shape) in models.iter().flat_map(|model| model.tensors()) {
            let found = match vars.get(name) {
                Some(var) if var.dims() == shape.as_slice() => continue,
                Some(var) => format!("one of shape {:?} where the model's is {shape:?}", var.dims()),
                None => "none of this name".to_owned(),
            };
            return Err(Error::Variable { tensor: name.clone(), found });
        }
        for (name, var) in &vars {
            if var.dtype() != DType::F32 || !var.device().same_device(device) {
                let found = format!("{:?} on {:?}", var.dtype(), var.device().location());
                return Err(Error::Variable { tensor: name.clone(), found });
            }
        }
        Ok(Parameters { vars, device: device.clone() })
    }

    /// Numbers to begin a training with, which depend on `seed`, the family and the tensors' names: see [`initial::fill`].
    ///
    /// # Errors
    /// What candle fails with.
    pub fn initial(models: &[&Model], seed: u64, device: &Device) -> Result<Parameters> {
        let mut vars = BTreeMap::new();
        for model in models {
            for (name, shape) in model.tensors() {
                if !vars.contains_key(name) {
                    let values = initial::fill(model.family(), name, shape, seed);
                    vars.insert(name.clone(), Var::from_vec(values, shape.as_slice(), device)?);
                }
            }
        }
        Ok(Parameters { vars, device: device.clone() })
    }

    /// The checkpoint's numbers for the tensors of `models`, which are read from it.
    ///
    /// # Errors
    /// [`Error::Variable`] for a tensor that the checkpoint has under another name only; those of reading; what candle fails with.
    pub fn of(checkpoint: &Checkpoint, models: &[&Model], device: &Device) -> Result<Parameters> {
        let mut vars = BTreeMap::new();
        for (name, shape) in models.iter().flat_map(|model| model.tensors()) {
            let Some(weight) = checkpoint.get(name) else {
                let found = format!("none of this name in {}", checkpoint.path().display());
                return Err(Error::Variable { tensor: name.clone(), found });
            };
            if !vars.contains_key(name) {
                vars.insert(name.clone(), Var::from_vec(weight.to_f32()?, shape.as_slice(), device)?);
            }
        }
        Ok(Parameters { vars, device: device.clone() })
    }

    /// Where the variables are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Names and variables, in the order of the names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.vars.iter().map(|(name, var)| (name.as_str(), var))
    }

    /// The variable of that name.
    pub fn get(&self, name: &str) -> Option<&Var> {
        self.vars.get(name)
    }

    /// Numbers in all of them.
    pub fn count(&self) -> usize {
        self.vars.values().map(|var| var.elem_count()).sum()
    }

    /// The weight as part of candle's graph: a variable, rows of one, or rows of several.
    pub(crate) fn value(&self, weight: &Weight) -> Result<Tensor> {
        let parts = weight.parts().into_iter().map(|part| self.part(&part)).collect::<Result<Vec<_>>>()?;
        let joined = match parts.as_slice() {
            [one] => one.clone(),
            [] => Tensor::zeros(weight.shape(), DType::F32, &self.device)?,
            // Matrices one below the other, which have one width.
            _ => Tensor::cat(&parts, 0)?,
        };
        Ok(if joined.dims() == weight.shape() { joined } else { joined.reshape(weight.shape())? })
    }

    fn part(&self, part: &Part) -> Result<Tensor> {
        let missing = || Error::Variable { tensor: part.tensor.clone(), found: "none of this name".to_owned() };
        let var = self.vars.get(&part.tensor).ok_or_else(missing)?;
        if part.elements == var.elem_count() {
            return Ok(var.as_tensor().clone());
        }
        // Whole rows of the first axis: a weight is never cut otherwise.
        let row = var.elem_count() / var.dim(0)?.max(1);
        Ok(var.narrow(0, part.at / row.max(1), part.elements / row.max(1))?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Rows of tensors one below the other, which no file has to hold.
    #[test]
    fn rows_of_several_tensors() {
        let tensor = |name: &str, rows: usize, first: f32| {
            let values = (0..2 * rows).map(|i| first + i as f32).collect();
            (name.to_owned(), Var::from_vec(values, (rows, 2), &Device::Cpu).unwrap())
        };
        let parameters = Parameters::new([tensor("a", 3, 0.0), tensor("b", 2, 10.0)], &[], &Device::Cpu).unwrap();
        let weights = [Weight::absent("a", &[3, 2]), Weight::absent("b", &[2, 2])];
        let stacked = Weight::stacked("both".to_owned(), &weights);
        let rows = |weight: &Weight| parameters.value(weight).unwrap().to_vec2::<f32>().unwrap();
        assert_eq!(rows(&stacked.rows(2..4)), [[4.0, 5.0], [10.0, 11.0]]);
        assert_eq!(rows(&stacked.rows(1..5).rows(0..1)), [[2.0, 3.0]]);
        assert_eq!(rows(&stacked.rows(4..5)), [[12.0, 13.0]]);
        assert_eq!(rows(&weights[0].rows(1..3).reshaped([4, 1])), [[2.0], [3.0], [4.0], [5.0]]);
        let error = parameters.value(&Weight::absent("c", &[1])).err().unwrap().to_string();
        assert_eq!(error, "parameter \"c\": expected a variable in F32 on the chosen device, found none of this name");
    }
}
