//! Inputs that a model can be tried with: what an export is verified on.

/// Elements of a sample.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum SampleData {
    F32(Vec<f32>),
    I64(Vec<i64>),
}

/// One input's values.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// The input's name.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Elements, row-major.
    pub data: SampleData,
}

/// A small deterministic generator (SplitMix64, Steele et al. 2014): the same samples on every machine.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator for `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// 64 uniform bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in 0..1.
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Standard normal (Box-Muller).
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        radius * (std::f32::consts::TAU * self.uniform()).cos()
    }

    /// Uniform in 0..n; 0 for n = 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n.max(1) as u64) as usize
    }

    /// Normal values of that shape.
    pub fn normals(&mut self, name: &str, shape: &[usize]) -> Sample {
        let data = (0..shape.iter().product()).map(|_| self.normal()).collect();
        Sample { name: name.to_owned(), shape: shape.to_vec(), data: SampleData::F32(data) }
    }

    /// Integers below `n` of that shape.
    pub fn ids(&mut self, name: &str, shape: &[usize], n: usize) -> Sample {
        let data = (0..shape.iter().product()).map(|_| self.below(n) as i64).collect();
        Sample { name: name.to_owned(), shape: shape.to_vec(), data: SampleData::I64(data) }
    }
}
