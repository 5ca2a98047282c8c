//! Converts the counts of runs and models into metric families, once per scrape.
//!
//! Runs and models come and go, and there may be thousands of them. They hold plain atomics, and one collector walks
//! over them. The labelled vectors of the `prometheus` crate would keep a few hundred bytes for each series. They also
//! look series up by a hash in which `("ab", "c")` equals `("a", "bc")`, and revive a removed series when a late call
//! counts into it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use prometheus::core::{Collector, Desc};
use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};

use super::table::{MetricFamilySpec, MetricKind};

/// A source of series that a scrape walks over.
pub(super) trait SeriesSource: Send + Sync {
    fn collect_series(&self, into: &mut SeriesBuilder);
}

/// A collector that registers a [`SeriesSource`] as the source of some families.
pub(super) struct SourceCollector<C> {
    descs: Vec<Desc>,
    source: Arc<C>,
}

/// The series collected so far, by the name of their family.
#[derive(Default)]
pub(super) struct SeriesBuilder(BTreeMap<&'static str, MetricFamily>);

impl<C: SeriesSource> SourceCollector<C> {
    pub(super) fn new(families: &[&MetricFamilySpec], source: Arc<C>) -> prometheus::Result<Self> {
        Ok(Self {
            descs: families.iter().map(|family| family_desc(family)).collect::<Result<_, _>>()?,
            source,
        })
    }
}

impl<C: SeriesSource> Collector for SourceCollector<C> {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mut series = SeriesBuilder::default();
        self.source.collect_series(&mut series);
        series.0.into_values().collect()
    }
}

impl SeriesBuilder {
    /// Adds one sample of a counter or a gauge. The label values are in the table's order.
    pub(super) fn push_sample(
        &mut self,
        family: &'static MetricFamilySpec,
        values: &[&str],
        sample: f64,
    ) {
        let mut metric = Metric::default();
        if let MetricKind::Counter = family.kind {
            let mut counter = Counter::default();
            counter.set_value(sample);
            metric.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(sample);
            metric.set_gauge(gauge);
        }
        self.push_metric(family, values, metric);
    }

    /// Adds a finished metric, such as a histogram's.
    pub(super) fn push_metric(
        &mut self,
        family: &'static MetricFamilySpec,
        values: &[&str],
        mut metric: Metric,
    ) {
        // A wrong number of values is a mistake in this program; `zip` would hide it.
        debug_assert_eq!(family.labels.len(), values.len(), "{}", family.name);
        metric.set_label(
            family.labels.iter().zip(values).map(|(name, value)| label_pair(name, value)).collect(),
        );
        self.0.entry(family.name).or_insert_with(|| empty_family(family)).mut_metric().push(metric);
    }
}

fn label_pair(name: &str, value: &str) -> LabelPair {
    let mut pair = LabelPair::default();
    pair.set_name(name.to_owned());
    pair.set_value(value.to_owned());
    pair
}

fn empty_family(family: &MetricFamilySpec) -> MetricFamily {
    let mut empty = MetricFamily::default();
    empty.set_name(family.name.to_owned());
    empty.set_help(family.help.to_owned());
    empty.set_field_type(match family.kind {
        MetricKind::Counter => MetricType::COUNTER,
        MetricKind::Gauge => MetricType::GAUGE,
        MetricKind::Histogram(_) => MetricType::HISTOGRAM,
    });
    empty
}

fn family_desc(family: &MetricFamilySpec) -> prometheus::Result<Desc> {
    let labels = family.labels.iter().map(|&label| label.to_owned()).collect();
    Desc::new(family.name.to_owned(), family.help.to_owned(), labels, HashMap::new())
}
