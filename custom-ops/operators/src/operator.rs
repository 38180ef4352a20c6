//! The definition of an operator: the trait [`Definition`], which each operator implements, and [`Operator`], its
//! type-erased form.

mod attributes;
mod body;
mod validate;

pub use attributes::Attributes;
pub(crate) use body::Builder;
pub use body::{Body, BodyNode, BodyValue, Variant};

use crate::attributes::{AttributeDef, AttributeSet, Source};
use crate::error::Error;
use crate::inputs::{List, Operand, Reader};
use crate::shape::{Dims, OutputDim, PartialShape, check_length};
use crate::tensor::{DType, Data, Tensor};

/// The part of a model that an operator belongs to; a profile adds up times by part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Scaled dot-product attention: scores, softmax, weighted values.
    Attention,
    /// Linear layers between tokens and heads.
    Projections,
    /// Selects heads and computes their gates.
    Router,
    /// Feed-forward layers.
    Mlp,
    /// Dense layers and convolutions of any part: a node's name says which.
    Dense,
    /// Normalisation.
    Norms,
}

/// An example call, which the tests of every backend run with random numbers.
#[derive(Debug, Clone)]
pub struct Example<A> {
    /// The attributes.
    pub attributes: A,
    /// Shapes of the inputs, in order. Optional ones at the end may be omitted.
    pub shapes: Vec<Vec<usize>>,
}

impl<A> Example<A> {
    /// An example with these shapes.
    pub fn new(attributes: A, shapes: &[&[usize]]) -> Example<A> {
        Example { attributes, shapes: shapes.iter().map(|shape| shape.to_vec()).collect() }
    }
}

/// One operator of [`DOMAIN`](crate::DOMAIN), independent of any backend.
pub trait Definition: Sized + 'static {
    /// ONNX operator name.
    const NAME: &'static str;
    /// Description (Markdown). It is part of `docs/operators.md` and of exported models.
    const DOC: &'static str;
    /// Inputs; optional ones last.
    const INPUTS: &'static [Operand];
    /// The output.
    const OUTPUT: Operand;
    /// The part of a model that it belongs to.
    const PART: Part;
    /// The version of [`DOMAIN`](crate::DOMAIN) that brought the operator. Its definition does not change after that.
    const SINCE: i64 = 1;
    /// The input whose memory may be the output's: where the output has its shape, only what differs needs to be written.
    const IN_PLACE: Option<usize> = None;

    /// Whether libmoh_ops leaves the operator to its body on processors where runtimes run that as fast.
    const MAY_BE_LEFT: bool = false;

    /// Its attributes.
    type Attributes: AttributeSet;
    /// Its inputs, each represented as the reader `R` defines.
    type Inputs<R: Reader>;
    /// Sizes and attributes of a validated call, as kernels need them.
    type Problem;

    /// Reads the inputs of a call.
    ///
    /// # Errors
    /// Errors of the reader.
    fn inputs<R: Reader>(reader: &R) -> Result<Self::Inputs<R>, R::Error>;

    /// The inputs in schema order.
    fn list<V: Copy>(inputs: &Self::Inputs<List<'_, V>>) -> Vec<Option<V>>;

    /// Checks constraints between attributes.
    ///
    /// # Errors
    /// [`Error::Attribute`] naming the attribute that is out of range.
    fn check(_: &Self::Attributes) -> Result<(), Error> {
        Ok(())
    }

    /// Validates the input shapes as far as they are known and returns the output's. Shapes are checked nowhere else.
    ///
    /// # Errors
    /// [`Error::Shape`] naming the input, the expected and the found shape.
    fn infer(
        attributes: &Self::Attributes,
        shapes: &Self::Inputs<List<'_, PartialShape<'_>>>,
    ) -> Result<Vec<OutputDim>, Error>;

    /// The sizes of a call whose attributes are checked and whose shapes [`Definition::infer`] accepted.
    ///
    /// # Errors
    /// As [`Definition::check`].
    fn problem(
        attributes: &Self::Attributes,
        shapes: &Self::Inputs<List<'_, &[usize]>>,
    ) -> Result<Self::Problem, Error>;

    /// The body variant that a node needs. A body cannot test an input's rank or whether an input is present.
    fn variant(attributes: &Self::Attributes, shapes: &Self::Inputs<List<'_, PartialShape<'_>>>) -> Variant;

    /// The shape of a tensor of [`Definition::filler`] that is equivalent to leaving out optional input `input`; `None` if it does
    /// not follow from the shapes.
    ///
    /// Needed if only some nodes of a model have the input: their common body requires it, and the others are given
    /// such a tensor.
    fn zeros(
        attributes: &Self::Attributes,
        shapes: &Self::Inputs<List<'_, PartialShape<'_>>>,
        input: usize,
    ) -> Option<Vec<usize>>;

    /// The number that each element of the tensor is that [`Definition::zeros`] gives the shape of.
    fn filler(_: &Self::Attributes, _input: usize) -> u8 {
        0
    }

    /// Error in units of the largest output that the attributes allow a kernel, beyond the rounding of T.
    fn rounding(_: &Self::Attributes) -> f64 {
        0.0
    }

    /// The operator in standard ONNX operators.
    fn body(variant: Variant) -> Body;

    /// The output in f64, following the operator's documentation step by step.
    fn reference(problem: &Self::Problem, inputs: &Self::Inputs<List<'_, Tensor<'_>>>) -> Vec<f64>;

    /// Small calls that together cover every attribute and layout; one of them has all inputs. Every backend and
    /// runtime plugin is tested on the examples of every registered operator.
    fn examples() -> Vec<Example<Self::Attributes>>;

    /// The type-erased operator.
    const OPERATOR: &'static Operator = &Operator {
        name: Self::NAME,
        doc: Self::DOC,
        inputs: Self::INPUTS,
        output: Self::OUTPUT,
        attributes: Self::Attributes::DEFS,
        part: Self::PART,
        since: Self::SINCE,
        in_place: Self::IN_PLACE,
        may_be_left: Self::MAY_BE_LEFT,
        read: |source| Attributes::from_source::<Self>(source),
        infer: |attributes, shapes| {
            let Ok(inputs) = Self::inputs(&partial(shapes));
            Self::infer(attributes.get::<Self>()?, &inputs)
        },
        variant: |attributes, shapes| {
            let Ok(inputs) = Self::inputs(&partial(shapes));
            Ok(Self::variant(attributes.get::<Self>()?, &inputs))
        },
        zeros: |attributes, shapes, input| {
            let Ok(inputs) = Self::inputs(&partial(shapes));
            Self::zeros(attributes.get::<Self>().ok()?, &inputs, input)
        },
        filler: |attributes, input| attributes.get::<Self>().map_or(0, |attributes| Self::filler(attributes, input)),
        rounding: |attributes| attributes.get::<Self>().map_or(0.0, Self::rounding),
        body: Self::body,
        reference: |attributes, tensors| {
            let problem =
                problem_of::<Self>(attributes, tensors.iter().map(|tensor| tensor.map(|tensor| tensor.shape)))?;
            let absent = Tensor { shape: &[], data: Data::F32(&[]) };
            let Ok(inputs) = Self::inputs(&List { inputs: tensors, absent });
            Ok(Self::reference(&problem, &inputs))
        },
        examples: || {
            let example = |Example { attributes, shapes }| {
                Ok(Example { attributes: Attributes::new::<Self>(attributes)?, shapes })
            };
            Self::examples().into_iter().map(example).collect()
        },
    };
}

/// A [`Reader`] of partially known shapes.
fn partial<'a>(inputs: &'a [Option<PartialShape<'a>>]) -> List<'a, PartialShape<'a>> {
    List { inputs, absent: &[] }
}

/// The sizes of a call whose shapes were validated.
///
/// # Errors
/// [`Error::Operator`] if the attributes belong to another operator.
pub fn problem_of<'a, D: Definition>(
    attributes: &Attributes,
    shapes: impl Iterator<Item = Option<&'a [usize]>>,
) -> Result<D::Problem, Error> {
    let shapes: Vec<Option<&[usize]>> = shapes.collect();
    let Ok(inputs) = D::inputs(&List { inputs: &shapes, absent: &[][..] });
    D::problem(attributes.get::<D>()?, &inputs)
}

/// Shapes of a node's inputs, as far as they are known.
type Shapes<'a> = [Option<PartialShape<'a>>];

/// A call's inputs.
type Tensors<'a> = [Option<Tensor<'a>>];

/// An operator chosen at run time, made from a [`Definition`].
pub struct Operator {
    /// ONNX operator name.
    pub name: &'static str,
    /// Description (Markdown).
    pub doc: &'static str,
    /// Inputs; optional ones last.
    pub inputs: &'static [Operand],
    /// The output.
    pub output: Operand,
    /// Attributes.
    pub attributes: &'static [AttributeDef],
    /// The part of a model that it belongs to.
    pub part: Part,
    /// The version of [`DOMAIN`](crate::DOMAIN) that brought the operator.
    pub since: i64,
    /// See [`Definition::IN_PLACE`].
    pub in_place: Option<usize>,
    /// See [`Definition::MAY_BE_LEFT`].
    pub may_be_left: bool,
    read: fn(&mut Source<'_>) -> Result<Attributes, Error>,
    infer: fn(&Attributes, &Shapes<'_>) -> Result<Vec<OutputDim>, Error>,
    variant: fn(&Attributes, &Shapes<'_>) -> Result<Variant, Error>,
    zeros: fn(&Attributes, &Shapes<'_>, usize) -> Option<Vec<usize>>,
    filler: fn(&Attributes, usize) -> u8,
    rounding: fn(&Attributes) -> f64,
    body: fn(Variant) -> Body,
    reference: fn(&Attributes, &Tensors<'_>) -> Result<Vec<f64>, Error>,
    examples: fn() -> Result<Vec<Example<Attributes>>, Error>,
}

impl std::fmt::Debug for Operator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Operator {
    fn eq(&self, other: &Operator) -> bool {
        self.name == other.name
    }
}

impl Eq for Operator {}

impl Operator {
    /// The number of required inputs.
    pub fn required_inputs(&self) -> usize {
        self.inputs.iter().filter(|input| !input.optional).count()
    }

    /// The output's element type if the type parameter T is `t`.
    pub fn output_dtype(&self, t: DType) -> DType {
        self.output.ty.dtype(t)
    }

    pub(crate) fn read(&self, source: &mut Source<'_>) -> Result<Attributes, Error> {
        (self.read)(source)
    }

    /// Validates shapes as far as they are known (`None`: unknown dimension) and returns the output's.
    ///
    /// # Errors
    /// [`Error`] naming the input, the expected and the found shape.
    pub fn infer(&self, attributes: &Attributes, shapes: &[Option<PartialShape<'_>>]) -> Result<Vec<OutputDim>, Error> {
        validate::check_count(self, shapes)?;
        (self.infer)(attributes, shapes)
    }

    /// Validates fully known shapes and returns the output's.
    ///
    /// # Errors
    /// As [`Operator::infer`].
    pub fn output_shape(&self, attributes: &Attributes, shapes: &[Option<&[usize]>]) -> Result<Dims, Error> {
        validate::output_shape(self, attributes, shapes)
    }

    /// Validates the number, shapes and element types of a call's inputs; returns T and the output's shape.
    ///
    /// # Errors
    /// As [`Operator::infer`].
    pub fn validate(
        &self,
        attributes: &Attributes,
        inputs: &[Option<(&[usize], DType)>],
    ) -> Result<(DType, Dims), Error> {
        validate::validate(self, attributes, inputs)
    }

    /// The body variant that a node needs: see [`Definition::variant`].
    ///
    /// # Errors
    /// [`Error::Operator`] if the attributes belong to another operator.
    pub fn variant(&self, attributes: &Attributes, shapes: &[Option<PartialShape<'_>>]) -> Result<Variant, Error> {
        (self.variant)(attributes, shapes)
    }

    /// See [`Definition::zeros`].
    pub fn zeros(
        &self,
        attributes: &Attributes,
        shapes: &[Option<PartialShape<'_>>],
        input: usize,
    ) -> Option<Vec<usize>> {
        (self.zeros)(attributes, shapes, input)
    }

    /// See [`Definition::filler`].
    pub fn filler(&self, attributes: &Attributes, input: usize) -> u8 {
        (self.filler)(attributes, input)
    }

    /// See [`Definition::rounding`].
    pub fn rounding(&self, attributes: &Attributes) -> f64 {
        (self.rounding)(attributes)
    }

    /// The operator in standard ONNX operators.
    pub fn body(&self, variant: Variant) -> Body {
        (self.body)(variant)
    }

    /// The output in f64.
    ///
    /// # Errors
    /// As [`Operator::validate`]; also if a tensor has fewer elements than its shape.
    pub fn reference(&self, attributes: &Attributes, inputs: &[Option<Tensor<'_>>]) -> Result<Vec<f64>, Error> {
        let described: Vec<_> = inputs.iter().map(|t| t.map(|t| (t.shape, t.data.dtype()))).collect();
        self.validate(attributes, &described)?;
        for (operand, tensor) in self.inputs.iter().zip(inputs) {
            let Some(tensor) = tensor else { continue };
            check_length(self.name, operand.name, tensor.shape, tensor.data.len())?;
        }
        (self.reference)(attributes, inputs)
    }

    /// Small calls for tests: see [`Definition::examples`].
    ///
    /// # Errors
    /// [`Error::Attribute`] if the attributes of an example are invalid.
    pub fn examples(&self) -> Result<Vec<Example<Attributes>>, Error> {
        (self.examples)()
    }
}
