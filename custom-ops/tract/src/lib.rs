//! The ai.moh operators for tract
