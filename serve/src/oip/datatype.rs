//! Element types as the protocol names them.

use crate::problem::Problem;
use moh_runtime::ElementType;

const NAMES: [(ElementType, &str); 8] = [
    (ElementType::Bool, "BOOL"),
    (ElementType::U8, "UINT8"),
    (ElementType::I32, "INT32"),
    (ElementType::I64, "INT64"),
    (ElementType::F16, "FP16"),
    (ElementType::BF16, "BF16"),
    (ElementType::F32, "FP32"),
    (ElementType::F64, "FP64"),
];

/// The protocol's name.
pub(super) fn name(ty: ElementType) -> &'static str {
    NAMES.iter().find(|(of, _)| *of == ty).map_or("", |(_, name)| name)
}

/// The type of that name, for the input `input`.
pub(super) fn parse(input: &str, name: &str) -> Result<ElementType, Problem> {
    let known = NAMES.iter().find(|(_, of)| *of == name).map(|(ty, _)| *ty);
    known.ok_or_else(|| {
        let names: Vec<&str> = NAMES.iter().map(|(_, name)| *name).collect();
        Problem::invalid(format!("input {input}: expected a datatype of {}, found {name:?}", names.join(", ")))
    })
}

/// The number of elements of a shape.
pub(super) fn elements(input: &str, shape: &[i64]) -> Result<(Vec<usize>, usize), Problem> {
    let bad = || Problem::invalid(format!("input {input}: {shape:?} is not a valid shape"));
    let sizes =
        shape.iter().map(|&size| usize::try_from(size).map_err(|_| bad())).collect::<Result<Vec<usize>, _>>()?;
    let count = sizes.iter().try_fold(1usize, |count, &size| count.checked_mul(size));
    let count = count.filter(|&count| count <= isize::MAX as usize / 8).ok_or_else(bad)?;
    Ok((sizes, count))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_type_has_a_name() {
        for &ty in ElementType::ALL {
            assert_eq!(parse("x", name(ty)), Ok(ty));
        }
        assert!(parse("x", "STRING").is_err());
    }

    #[test]
    fn shapes_have_a_number_of_elements() {
        assert_eq!(elements("x", &[2, 3]).unwrap(), (vec![2, 3], 6));
        assert_eq!(elements("x", &[]).unwrap().1, 1);
        assert_eq!(elements("x", &[0, 9]).unwrap().1, 0);
        for bad in [&[-1][..], &[i64::MAX, 2], &[1 << 40, 1 << 40], &[i64::MAX]] {
            assert!(elements("x", bad).is_err(), "{bad:?}");
        }
    }
}
