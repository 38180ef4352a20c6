//! Settings from environment variables.

use moh_operators::Error;
use std::str::FromStr;
use std::sync::OnceLock;

/// Environment variable that selects kernels by [`crate::Kernel::isa`] instead of automatically.
pub const ISA_VARIABLE: &str = "MOH_CPU_ISA";

/// The instruction set selected by the environment. Read once: reading an environment variable takes a lock, and a
/// change while kernels run is not supported.
pub(crate) fn forced_isa() -> Option<&'static str> {
    static FORCED: OnceLock<Option<String>> = OnceLock::new();
    let read = || std::env::var(ISA_VARIABLE).ok().filter(|isa| !isa.is_empty());
    FORCED.get_or_init(read).as_deref()
}

/// Environment variable with the [`Precision`] of hosts that set none.
pub const PRECISION_VARIABLE: &str = "MOH_FLOAT32_MATMUL_PRECISION";

/// How exactly matrix units multiply float32 in dense layers, projections and attention (Linear, LinearActivation, RoutedProjection, RoutedCombine,
/// RoutedAttention, RoutedCachedAttention). Names and meanings are those of PyTorch's `torch.set_float32_matmul_precision`; attention has bfloat16 terms in
/// the place of digits, three, two or one. Sums are always float32, and so are products by vectors,
/// except for those of few rows by weights that are packed in fewer bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Precision {
    /// With the error of float32: fixed point with the 24 bits of float32, three digits a number, six products of bytes.
    #[default]
    Highest,
    /// Fixed point with 16 bits, two digits a number, three products of bytes: half of the time, and errors of about 5e-5 of a result's usual
    /// size.
    High,
    /// Numbers are rounded to bfloat16, 8 bits: one product, and errors of about 2e-3.
    Medium,
}

impl Precision {
    /// The values of [`PRECISION_VARIABLE`].
    pub const NAMES: [(&str, Precision); 3] =
        [("highest", Precision::Highest), ("high", Precision::High), ("medium", Precision::Medium)];

    /// Its name.
    pub fn name(self) -> &'static str {
        Precision::NAMES.iter().find(|(_, precision)| *precision == self).map_or("highest", |(name, _)| name)
    }
}

impl FromStr for Precision {
    type Err = String;

    /// # Errors
    /// What was expected and found.
    fn from_str(name: &str) -> Result<Precision, String> {
        let found = Precision::NAMES.iter().find(|(known, _)| *known == name);
        let names = Precision::NAMES.map(|(name, _)| name);
        found.map(|(_, precision)| *precision).ok_or_else(|| format!("expected {}, found {name:?}", names.join(", ")))
    }
}

/// The precision that the environment asks for, read once; [`Precision::Highest`] where it has no valid name.
pub(crate) fn precision() -> Precision {
    checked_precision().unwrap_or_default()
}

/// The precision of hosts that set none, from [`PRECISION_VARIABLE`].
///
/// # Errors
/// [`Error::Setting`] for another value than those of [`Precision::NAMES`], with which kernels use [`Precision::Highest`].
pub fn checked_precision() -> Result<Precision, Error> {
    static FOUND: OnceLock<Result<Precision, String>> = OnceLock::new();
    let read = || match std::env::var_os(PRECISION_VARIABLE) {
        Some(name) if !name.is_empty() => name.to_string_lossy().parse(),
        _ => Ok(Precision::default()),
    };
    let refused = |reason| Error::Setting { variable: PRECISION_VARIABLE, reason };
    FOUND.get_or_init(read).clone().map_err(refused)
}
