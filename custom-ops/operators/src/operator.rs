//! What an operator is: [`Definition`], which each operator implements, and [`Operator`], the same for code that works with
//! any operator.

mod attributes;
mod body;
mod validate;

pub use attributes::Attributes;
pub(crate) use body::Builder;
pub use body::{Body, BodyNode, BodyValue, Variant};

use crate::attributes::{AttributeDef, AttributeSet, Source};
use crate::error::Error;
use crate::inputs::{ElementType, List, Operand, Reader};
use crate::shape::{Dims, OutputDim, PartialShape, check_length};
use crate::tensor::{DType, Data, Tensor};

/// What an operator does in a model: a profile adds up the operators of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Scores, softmax and values.
    Attention,
    /// Linear layers between tokens and heads.
    Projections,
    /// Selection of heads and computation of their gates.
    Router,
    /// Feed-forward layers.
    Mlp,
}

/// A call that the tests of every backend make, with random numbers.
#[derive(Debug, Clone)]
pub struct Example<A> {
    /// The attributes.
    pub attributes: A,
    /// The inputs' shapes, in their order; the optional ones at the end may be left out.
    pub shapes: Vec<Vec<usize>>,
}

impl<A> Example<A> {
    /// An example with these shapes.
    pub fn new(attributes: A, shapes: &[&[usize]]) -> Example<A> {
        Example { attributes, shapes: shapes.iter().map(|shape| shape.to_vec()).collect() }
    }
}

/// One operator of [`DOMAIN`](crate::DOMAIN): everything that is true of it whatever computes it.
pub trait Definition: Sized + 'static {
    /// ONNX operator name.
    const NAME: &'static str;
    /// Meaning, for people (Markdown).
    const DOC: &'static str;
    /// Inputs; optional ones last.
    const INPUTS: &'static [Operand];
    /// The output.
    const OUTPUT: Operand;
    /// What it does in a model.
    const PART: Part;

    /// Its attributes.
    type Attributes: AttributeSet;
    /// Its inputs, each as `R` has it.
    type Inputs<R: Reader>;
    /// A validated call: sizes and attributes, as kernels need them.
    type Problem;

    /// The inputs of a call.
    ///
    /// # Errors
    /// The reader's.
    fn inputs<R: Reader>(reader: &R) -> Result<Self::Inputs<R>, R::Error>;

    /// The same inputs in their order.
    fn list<V: Copy>(inputs: &Self::Inputs<List<'_, V>>) -> Vec<Option<V>>;

    /// Checks what must hold between attributes.
    ///
    /// # Errors
    /// [`Error::Attribute`] naming the one that does not fit.
    fn check(_: &Self::Attributes) -> Result<(), Error> {
        Ok(())
    }

    /// Validates shapes as far as they are known; gives the output's. The only place where shapes are judged.
    ///
    /// # Errors
    /// [`Error::Shape`] naming the input, what was expected and what was found.
    fn infer(
        attributes: &Self::Attributes,
        shapes: &Self::Inputs<List<'_, PartialShape<'_>>>,
    ) -> Result<Vec<OutputDim>, Error>;

    /// Reads a call from checked attributes and from shapes that [`Definition::infer`] accepted.
    ///
    /// # Errors
    /// Those of [`Definition::check`].
    fn problem(
        attributes: &Self::Attributes,
        shapes: &Self::Inputs<List<'_, &[usize]>>,
    ) -> Result<Self::Problem, Error>;

    /// Which body a node needs: it can ask neither for the rank of an input nor whether it is there.
    fn variant(attributes: &Self::Attributes, shapes: &Self::Inputs<List<'_, PartialShape<'_>>>) -> Variant;

    /// The shape of zeros that change nothing in the place of optional input `input`; `None` where they cannot be told.
    ///
    /// For models in which some nodes have the input and some do not: their common body takes it.
    fn zeros(
        attributes: &Self::Attributes,
        shapes: &Self::Inputs<List<'_, PartialShape<'_>>>,
        input: usize,
    ) -> Option<Vec<usize>>;

    /// The operator in standard ONNX operators.
    fn body(variant: Variant) -> Body;

    /// The output in f64, word by word from the operator's documentation.
    fn reference(problem: &Self::Problem, inputs: &Self::Inputs<List<'_, Tensor<'_>>>) -> Vec<f64>;

    /// Small calls that between them use every attribute and layout, one of them with all inputs. Tests make them in every backend and
    /// runtime because the operator is registered.
    fn examples() -> Vec<Example<Self::Attributes>>;

    /// The operator for code that works with any.
    const OPERATOR: &'static Operator = &Operator {
        name: Self::NAME,
        doc: Self::DOC,
        inputs: Self::INPUTS,
        output: Self::OUTPUT,
        attributes: Self::Attributes::DEFS,
        part: Self::PART,
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

/// Shapes as a [`Reader`].
fn partial<'a>(inputs: &'a [Option<PartialShape<'a>>]) -> List<'a, PartialShape<'a>> {
    List { inputs, absent: &[] }
}

/// The problem of a call whose shapes were validated.
///
/// # Errors
/// [`Error::Operator`] where the attributes are another operator's.
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

/// An operator that is known only at run time. Made from a [`Definition`].
pub struct Operator {
    /// ONNX operator name.
    pub name: &'static str,
    /// Meaning, for people (Markdown).
    pub doc: &'static str,
    /// Inputs; optional ones last.
    pub inputs: &'static [Operand],
    /// The output.
    pub output: Operand,
    /// Attributes.
    pub attributes: &'static [AttributeDef],
    /// What it does in a model.
    pub part: Part,
    read: fn(&mut Source<'_>) -> Result<Attributes, Error>,
    infer: fn(&Attributes, &Shapes<'_>) -> Result<Vec<OutputDim>, Error>,
    variant: fn(&Attributes, &Shapes<'_>) -> Result<Variant, Error>,
    zeros: fn(&Attributes, &Shapes<'_>, usize) -> Option<Vec<usize>>,
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
    /// The number of inputs that every node has.
    pub fn required_inputs(&self) -> usize {
        self.inputs.iter().filter(|input| !input.optional).count()
    }

    /// The output's element type, where T is `t`.
    pub fn output_dtype(&self, t: DType) -> DType {
        match self.output.ty {
            ElementType::T => t,
            ElementType::Float32 => DType::F32,
        }
    }

    pub(crate) fn read(&self, source: &mut Source<'_>) -> Result<Attributes, Error> {
        (self.read)(source)
    }

    /// Validates shapes as far as they are known (`None`: the dimension is not); gives the output's.
    ///
    /// # Errors
    /// [`Error`] naming the input, what was expected and what was found.
    pub fn infer(&self, attributes: &Attributes, shapes: &[Option<PartialShape<'_>>]) -> Result<Vec<OutputDim>, Error> {
        validate::check_count(self, shapes)?;
        (self.infer)(attributes, shapes)
    }

    /// Validates fully known shapes and gives the output's.
    ///
    /// # Errors
    /// As [`Operator::infer`].
    pub fn output_shape(&self, attributes: &Attributes, shapes: &[Option<&[usize]>]) -> Result<Dims, Error> {
        validate::output_shape(self, attributes, shapes)
    }

    /// Validates a call: number, shapes and element types of its inputs; gives T and the output's shape.
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

    /// Which body a node needs.
    ///
    /// # Errors
    /// [`Error::Operator`] where the attributes are another operator's.
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

    /// The operator in standard ONNX operators.
    pub fn body(&self, variant: Variant) -> Body {
        (self.body)(variant)
    }

    /// The output in f64.
    ///
    /// # Errors
    /// As [`Operator::validate`]; a tensor with fewer elements than its shape says.
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
    /// [`Error::Attribute`] where the operator refuses its own example.
    pub fn examples(&self) -> Result<Vec<Example<Attributes>>, Error> {
        (self.examples)()
    }
}
