//! What a diffusion model makes, as pictures: as it is, or through a VAE's decoder.

use crate::error::{Error, Result};
use crate::image::Picture;
use crate::task;
use moh_runtime::{Dim, ElementType, Model, Tensor};

/// What the latents of the VAE that the published models use were multiplied by.
pub const SCALING_FACTOR: f64 = 0.18215;

/// The decoder of a VAE: one input of latents (batch, channels, height, width), pictures of 3 channels or 1 out.
#[derive(Debug)]
pub struct Decoder {
    model: Model,
    input: String,
    channels: usize,
    element_type: ElementType,
}

impl Decoder {
    /// Looks whether `model` is such a decoder.
    ///
    /// # Errors
    /// [`Error::Task`] for another kind of model.
    pub fn new(model: Model) -> Result<Decoder> {
        let found = match model.inputs() {
            [input] => match input.dims[..] {
                [_, Dim::Fixed(channels), _, _] => Some((input.name.clone(), channels, input.element_type)),
                _ => None,
            },
            _ => None,
        };
        match found {
            Some((input, channels, element_type)) => Ok(Decoder { model, input, channels, element_type }),
            None => {
                let inputs: Vec<String> = model.inputs().iter().map(ToString::to_string).collect();
                let reason =
                    format!("expected one input (batch, channels, height, width), found {}", inputs.join(", "));
                Err(task::other_task(&model, "a VAE's decoder", reason))
            }
        }
    }

    /// Channels of the latents that it takes.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Decodes `latents` (batch, channels, height, width) float32, divided by `scaling_factor`, one sample at a time: a
    /// decoder takes far more memory than what it decodes.
    ///
    /// # Errors
    /// [`Error::Request`] where the latents have other channels, [`Error::Runtime`] where the runtime fails, [`Error::Output`] where
    /// it gives no pictures.
    pub fn decode(&mut self, latents: &Tensor, scaling_factor: f64) -> Result<Vec<Picture>> {
        let (&[batch, channels, height, width], Some(numbers)) = (latents.shape(), latents.as_slice::<f32>()) else {
            return Err(self.request(format!("expected float32 latents of 4 dimensions, found {:?}", latents.shape())));
        };
        if channels != self.channels {
            return Err(self.request(format!("it decodes latents of {} channels, found {channels}", self.channels)));
        }
        let scaled: Vec<f32> = numbers.iter().map(|&x| (f64::from(x) / scaling_factor) as f32).collect();
        let mut decoded = Vec::with_capacity(batch);
        for sample in scaled.chunks(channels * height * width) {
            let latent =
                Tensor::rounded(&self.input, [1, channels, height, width], sample.to_vec(), self.element_type)?;
            let outputs = self.model.run([(self.input.as_str(), latent.into())])?;
            let output = outputs.first().ok_or_else(|| self.bad("no output".to_owned()))?;
            let numbers = output.data()?.to_f32().ok_or_else(|| self.bad(output.element_type().to_string()))?;
            let picture =
                Tensor::new(output.shape(), numbers).map_err(Error::from).and_then(|tensor| pictures(&tensor));
            let picture = picture.ok().and_then(|mut pictures| (pictures.len() == 1).then(|| pictures.remove(0)));
            decoded.push(picture.ok_or_else(|| self.bad(format!("shape {:?}", output.shape())))?);
        }
        Ok(decoded)
    }

    fn request(&self, reason: String) -> Error {
        Error::Request { path: self.model.path().to_owned(), reason }
    }

    fn bad(&self, found: String) -> Error {
        let reason = format!("expected a picture (1, 1 or 3, height, width) of floating-point numbers, found {found}");
        Error::Output { path: self.model.path().to_owned(), runtime: self.model.runtime_name(), reason }
    }
}

/// Pictures from (batch, 1 or 3, height, width) float32 numbers of -1 (black) to 1; what is beyond is cut.
///
/// # Errors
/// [`Error::Samples`] for another shape or type.
pub fn pictures(samples: &Tensor) -> Result<Vec<Picture>> {
    let (&[_, channels @ (1 | 3), height, width], Some(numbers)) = (samples.shape(), samples.as_slice::<f32>()) else {
        return Err(Error::Samples { found: format!("{} {:?}", samples.element_type(), samples.shape()) });
    };
    let plane = height * width;
    let sample = |x: f32| (f64::from(x) * 127.5 + 128.0).clamp(0.0, 255.0) as u8;
    let interleaved = |picture: &[f32]| -> Vec<u8> {
        (0..plane).flat_map(|pixel| (0..channels).map(move |c| c * plane + pixel)).map(|i| sample(picture[i])).collect()
    };
    numbers.chunks((channels * plane).max(1)).map(|p| Picture::new(width, height, channels, interleaved(p))).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn numbers_become_samples() {
        let numbers = vec![-1.0f32, 1.0, 0.0, -9.0, 9.0, f32::NAN];
        let gray = pictures(&Tensor::new([3, 1, 1, 2], numbers.clone()).unwrap()).unwrap();
        let samples: Vec<&[u8]> = gray.iter().map(Picture::samples).collect();
        assert_eq!(samples, [[0, 255], [128, 0], [255, 0]]);
        let colours = pictures(&Tensor::new([1, 3, 1, 2], numbers).unwrap()).unwrap();
        assert_eq!(colours, [Picture::new(2, 1, 3, vec![0, 128, 255, 255, 0, 0]).unwrap()]);
    }

    #[test]
    fn latents_are_no_pictures() {
        assert!(pictures(&Tensor::new([1, 4, 1, 1], vec![0f32; 4]).unwrap()).is_err());
        assert!(pictures(&Tensor::new([4], vec![0f32; 4]).unwrap()).is_err());
        assert!(pictures(&Tensor::new([1, 1, 1, 1], vec![0i64]).unwrap()).is_err());
    }
}
